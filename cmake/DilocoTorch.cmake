# torch as two imported targets. Not find_package(Torch): that one refuses a CUDA wheel on a machine without the
# toolkit even for a CPU-only build, and adds flags nobody here needs.
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import torch; print(torch.__path__[0], torch.__version__, sep=';')"
  OUTPUT_VARIABLE torch_found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE torch_result)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "${Python3_EXECUTABLE} cannot import torch; install torch 2.11 or newer there, or configure "
                      "with -DDILOCO_BUILD_PYTHON=OFF.")
endif()
list(GET torch_found 0 TORCH_ROOT)
list(GET torch_found 1 torch_version)
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has torch ${torch_version}; 2.11 or newer is needed.")
endif()
message(STATUS "torch ${torch_version} in ${TORCH_ROOT}")

# The include directory comes first on the command line, so torch's own copy of pybind11 is the one found: another
# pybind11 compiles too, and then refuses a ProcessGroup argument at call time.
add_library(torch INTERFACE IMPORTED)
target_include_directories(torch SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
target_link_libraries(torch INTERFACE ${TORCH_ROOT}/lib/libtorch_cpu.so ${TORCH_ROOT}/lib/libc10.so)

add_library(torch_python INTERFACE IMPORTED)
target_link_libraries(torch_python INTERFACE torch ${TORCH_ROOT}/lib/libtorch_python.so)
