# After llama.cpp is built and before anything is installed, self_check.cpp multiplies with the built CPU backend; a
# crash or a wrong product fails the build. It has to run on this machine, or through CMAKE_CROSSCOMPILING_EMULATOR.
option(KVQ_SELF_CHECK "multiply with the built llama.cpp before it is installed" ON)
set(kvq_check_note "skipped (KVQ_SELF_CHECK=OFF)")
if(KVQ_SELF_CHECK AND CMAKE_CROSSCOMPILING AND NOT CMAKE_CROSSCOMPILING_EMULATOR)
    set(kvq_check_note "skipped (cross-compiled)")
elseif(KVQ_SELF_CHECK)
    add_executable(kvq-self-check ${CMAKE_CURRENT_LIST_DIR}/self_check.cpp)
    target_link_libraries(kvq-self-check PRIVATE upstream-ggml-base ${CMAKE_DL_LIBS})
    set_target_properties(kvq-self-check PROPERTIES
        OUTPUT_NAME self-check RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests BUILD_RPATH ${KVQ_STAGE})
    add_dependencies(kvq-self-check llama-programs)
    add_custom_target(kvq-self-checked ALL
        COMMAND kvq-self-check ${KVQ_STAGE} ${kvq_compiler}
        DEPENDS kvq-self-check
        COMMENT "llama.cpp: self-check of the CPU backend" USES_TERMINAL VERBATIM)
    set(kvq_check_note "passed when it was built")
endif()
if(NOT TARGET kvq-self-check)
    message(STATUS "self-check: ${kvq_check_note}")
endif()
