# Compiler-wide settings that follow from the options in the root CMakeLists.txt.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# g++ 12 cannot scan for modules, and there are none.
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# Paths relative to the checkout, so that a clone in another folder finds the same entries.
find_program(DILOCO_CCACHE ccache)
if(DILOCO_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${DILOCO_CCACHE})
endif()

if(DILOCO_USE_CUDA)
  message(FATAL_ERROR "DILOCO_USE_CUDA: there are no CUDA kernels yet; configure without it.")
endif()
if(DILOCO_BUILD_FUZZERS AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "DILOCO_BUILD_FUZZERS needs clang with libFuzzer, not ${CMAKE_CXX_COMPILER_ID}; "
                      "configure with -DCMAKE_CXX_COMPILER=clang++-19 (packages clang-19, libclang-rt-19-dev).")
endif()

# Every one of our targets links this; third-party code does not see it.
add_library(diloco_flags INTERFACE)
target_compile_options(diloco_flags INTERFACE -Wall -Wextra $<$<BOOL:${DILOCO_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 sees uninitialised members in every vector<variant> at -O3, and overlapping copies in every assignment of a
  # literal to a std::string; clang and the sanitizers look for real ones.
  target_compile_options(diloco_flags INTERFACE -Wno-maybe-uninitialized -Wno-restrict)
endif()

if(DILOCO_SANITIZE STREQUAL "address")
  set(DILOCO_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -Og)
elseif(DILOCO_SANITIZE STREQUAL "thread")
  set(DILOCO_SANITIZE_FLAGS -fsanitize=thread -fno-omit-frame-pointer -g1 -Og)
elseif(DILOCO_SANITIZE)
  message(FATAL_ERROR "DILOCO_SANITIZE must be address or thread, not \"${DILOCO_SANITIZE}\".")
endif()
# torch itself is not instrumented: to ThreadSanitizer all its locks would be races.
if(DILOCO_SANITIZE STREQUAL "thread" AND DILOCO_BUILD_PYTHON)
  message(FATAL_ERROR "DILOCO_SANITIZE=thread is for the torch-free part; add -DDILOCO_BUILD_PYTHON=OFF.")
endif()
if(DILOCO_BUILD_FUZZERS)
  list(APPEND DILOCO_SANITIZE_FLAGS -fsanitize=fuzzer-no-link)
endif()
target_compile_options(diloco_flags INTERFACE ${DILOCO_SANITIZE_FLAGS})
target_link_options(diloco_flags INTERFACE ${DILOCO_SANITIZE_FLAGS})
