# tests/native/<name>.cpp -> test executable <name>, linked to every object of libggml-kvq and to upstream's libraries.
enable_testing()
file(GLOB native_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/native/*.cpp)
if(NOT GGML_CUDA) # these need a device
    list(FILTER native_tests EXCLUDE REGEX "/test_cuda[^/]*\\.cpp$")
endif()
foreach(file IN LISTS native_tests)
    get_filename_component(name ${file} NAME_WE)
    add_executable(${name} ${file})
    add_dependencies(${name} llama-programs)
    target_link_libraries(${name} PRIVATE kvq-objects upstream-ggml upstream-ggml-cpu upstream-ggml-base)
    target_include_directories(${name} SYSTEM PRIVATE ${LLAMA_CPP_DIR}/ggml/include ${LLAMA_CPP_DIR}/ggml/src)
    set_target_properties(${name} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests BUILD_RPATH ${KVQ_STAGE})
    add_test(NAME ${name} COMMAND ${name})
endforeach()

# Cycles of every kernel (docs/performance.md); it holds them against the portable ones on the way, which makes its quick run a test.
add_executable(bench_kernels ${CMAKE_CURRENT_SOURCE_DIR}/scripts/bench_kernels.cpp)
add_dependencies(bench_kernels llama-programs)
target_link_libraries(bench_kernels PRIVATE kvq-objects upstream-ggml upstream-ggml-cpu upstream-ggml-base)
set_target_properties(bench_kernels PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests BUILD_RPATH ${KVQ_STAGE})
add_test(NAME bench_kernels COMMAND bench_kernels --quick)

# examples/ggml-graph.cpp: a ggml program on libggml-kvq.so alone, as a user would link it.
add_executable(ggml-graph ${CMAKE_CURRENT_SOURCE_DIR}/examples/ggml-graph.cpp)
add_dependencies(ggml-graph llama-programs ggml-kvq)
target_include_directories(ggml-graph PRIVATE ${kvq_src}/include)
target_include_directories(ggml-graph SYSTEM PRIVATE ${LLAMA_CPP_DIR}/ggml/include)
target_link_libraries(ggml-graph PRIVATE kvq-flags $<TARGET_FILE:ggml-kvq> upstream-ggml upstream-ggml-cpu upstream-ggml-base)
set_target_properties(ggml-graph PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/examples BUILD_RPATH "${CMAKE_CURRENT_BINARY_DIR}/lib;${KVQ_STAGE}")
add_test(NAME ggml-graph COMMAND ggml-graph)

# The library on a device of a test: tests/test_native.py
add_library(ggml-kvq-apart MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:kvq-core> $<TARGET_OBJECTS:kvq-host>
    $<TARGET_OBJECTS:kvq-process> ${kvq_cuda_objects} ${CMAKE_CURRENT_SOURCE_DIR}/tests/native/linked/apart_engine.cpp)
target_include_directories(ggml-kvq-apart SYSTEM PRIVATE ${LLAMA_CPP_DIR}/ggml/include ${LLAMA_CPP_DIR}/ggml/src)
target_link_libraries(ggml-kvq-apart PRIVATE kvq-flags ${CMAKE_DL_LIBS})
target_link_options(ggml-kvq-apart PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map)
set_target_properties(ggml-kvq-apart PROPERTIES
    PREFIX lib SUFFIX .so LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
