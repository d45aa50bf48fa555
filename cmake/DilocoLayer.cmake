# diloco_layer(<name> SOURCES a.cpp ... [DEPENDS <layer> ...] [LIBS <target> ...] [PUBLIC_LIBS <target> ...])
#
# One layer of csrc/diloco: static library diloco_<name>, alias diloco::<name>. DEPENDS are layers to its left and
# are public; LIBS stay private to the sources (fmt, json, zmq ...), PUBLIC_LIBS are for what its headers include.
function(diloco_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS;LIBS;PUBLIC_LIBS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "diloco_layer(${name}): unexpected ${arg_UNPARSED_ARGUMENTS}")
  endif()
  add_library(diloco_${name} STATIC ${arg_SOURCES})
  add_library(diloco::${name} ALIAS diloco_${name})
  target_include_directories(diloco_${name} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  foreach(depend IN LISTS arg_DEPENDS)  # TEMPORARY while layers land
    if(NOT TARGET diloco_${depend})
      message(WARNING "layer ${name}: ${depend} is not there yet")
      list(REMOVE_ITEM arg_DEPENDS ${depend})
    endif()
  endforeach()
  list(TRANSFORM arg_DEPENDS PREPEND diloco::)
  target_link_libraries(diloco_${name} PUBLIC ${arg_DEPENDS} ${arg_PUBLIC_LIBS} PRIVATE diloco_flags ${arg_LIBS})
  set_property(GLOBAL APPEND PROPERTY DILOCO_LAYERS diloco_${name})
endfunction()
