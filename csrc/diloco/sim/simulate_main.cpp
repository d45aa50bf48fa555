#include "diloco/sim/simulate.h"

int main(int argc, char** argv) { return diloco::sim::run_simulate_program(argc, argv); }
