# The system libraries of the torch-free layers. find_path and find_library rather than pkg-config: a second
# configure must give the same command lines, or everything is rebuilt (imported pkg-config targets do not).
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)

find_path(ZMQ_INCLUDE_DIR zmq.h REQUIRED)
find_path(CPPZMQ_INCLUDE_DIR zmq.hpp REQUIRED)
find_library(ZMQ_LIBRARY zmq REQUIRED)
add_library(diloco_zmq INTERFACE)
target_include_directories(diloco_zmq SYSTEM INTERFACE ${ZMQ_INCLUDE_DIR} ${CPPZMQ_INCLUDE_DIR})
target_link_libraries(diloco_zmq INTERFACE ${ZMQ_LIBRARY})
add_library(diloco::zmq ALIAS diloco_zmq)

find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
find_library(XXHASH_LIBRARY xxhash REQUIRED)
add_library(diloco_xxhash INTERFACE)
target_include_directories(diloco_xxhash SYSTEM INTERFACE ${XXHASH_INCLUDE_DIR})
target_link_libraries(diloco_xxhash INTERFACE ${XXHASH_LIBRARY})
add_library(diloco::xxhash ALIAS diloco_xxhash)

find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h REQUIRED)
add_library(diloco_toml INTERFACE)
target_include_directories(diloco_toml SYSTEM INTERFACE ${TOMLPLUSPLUS_INCLUDE_DIR})
add_library(diloco::toml ALIAS diloco_toml)
