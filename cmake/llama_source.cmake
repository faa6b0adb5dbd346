# LLAMA_CPP_DIR: the llama.cpp source whose headers libggml-kvq.so is compiled against. Backend structs change between ggml
# versions under one API number, so the headers have to be those of the program that loads the library.
if(NOT LLAMA_CPP_DIR)
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(
        COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_llama_cpp.py
        OUTPUT_VARIABLE fetched OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "the llama.cpp source could not be fetched; the reason stands above")
    endif()
    set(LLAMA_CPP_DIR "${fetched}")
    set(KVQ_LLAMA_PINNED ON)
else()
    get_filename_component(LLAMA_CPP_DIR "${LLAMA_CPP_DIR}" ABSOLUTE)
    set(KVQ_LLAMA_PINNED OFF)
endif()

foreach(needed ggml/CMakeLists.txt ggml/src/ggml-backend-impl.h include/llama.h)
    if(NOT EXISTS ${LLAMA_CPP_DIR}/${needed})
        message(FATAL_ERROR "LLAMA_CPP_DIR=${LLAMA_CPP_DIR} has no ${needed}; give the root of a llama.cpp source tree")
    endif()
endforeach()

file(STRINGS ${LLAMA_CPP_DIR}/ggml/CMakeLists.txt version_lines REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) ")
set(KVQ_GGML_VERSION "")
foreach(line IN LISTS version_lines)
    string(REGEX MATCH "(MAJOR|MINOR|PATCH) ([0-9]+)" _ "${line}")
    set(ggml_version_${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endforeach()
if(NOT DEFINED ggml_version_PATCH)
    message(FATAL_ERROR "no GGML_VERSION_{MAJOR,MINOR,PATCH} in ${LLAMA_CPP_DIR}/ggml/CMakeLists.txt; ggml 0.25.3 is what this project was written for")
endif()
set(KVQ_GGML_VERSION "${ggml_version_MAJOR}.${ggml_version_MINOR}.${ggml_version_PATCH}")
set(KVQ_GGML_SOVERSION ${ggml_version_MAJOR})
message(STATUS "llama.cpp source: ${LLAMA_CPP_DIR} (ggml ${KVQ_GGML_VERSION})")

# Facts about ggml's interface that the source needs, each a static assertion: a tree where one is gone is refused here.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -std=c++17 -fsyntax-only -w
        -I${LLAMA_CPP_DIR}/ggml/include -I${LLAMA_CPP_DIR}/ggml/src -I${LLAMA_CPP_DIR}/include
        ${CMAKE_CURRENT_SOURCE_DIR}/ggml-kvq/host/seam.cpp
    RESULT_VARIABLE failed ERROR_VARIABLE said OUTPUT_QUIET)
if(failed)
    string(REGEX MATCHALL "error: [^\n]*" facts "${said}")
    list(TRANSFORM facts REPLACE "^error: (static assertion failed: |static_assert failed[^\"]*)?" "  ")
    string(REPLACE ";" "\n" facts "${facts}")
    message(FATAL_ERROR
        "this llama.cpp (ggml ${KVQ_GGML_VERSION}) has another backend interface than libggml-kvq knows:\n${facts}\n"
        "Use a llama.cpp of the range that README.md names, or port ggml-kvq/host/seam.cpp and what it lists.")
endif()
