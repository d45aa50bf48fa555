#include "diloco/syncer/syncer.h"

int main(int argc, char** argv) { return diloco::run_syncer_program(argc, argv); }
