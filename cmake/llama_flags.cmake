# Included by llama.cpp's project() call. Argument parsing, chat templates, HTTP and multimodal code are two thirds of the
# compile time and none of the inference time: -O1 halves it. libggml*, libllama and the program logic of llama-bench and
# llama-perplexity keep upstream's flags.
function(kvq_quick_targets)
    if(NOT CMAKE_BUILD_TYPE STREQUAL "Release")
        return()
    endif()
    foreach(target llama-common cpp-httplib mtmd server-context llama-server-impl llama-cli-impl)
        if(TARGET ${target})
            target_compile_options(${target} PRIVATE -O1)
        endif()
    endforeach()
endfunction()
cmake_language(DEFER CALL kvq_quick_targets)
