# Included by the project() call of the pinned llama.cpp, in place of llama_flags.cmake: files of one target are compiled several
# at a time (unity builds), so that headers are read and templates are made once and not 50 times. Upstream does it with the
# models of libllama; here the rest of libllama and what llama_flags.cmake calls slow join. Sources and flags stay as they are.
# Only for the pinned source, where no name of one file means anything else in another; a file that breaks this compiles alone.
include(${CMAKE_CURRENT_LIST_DIR}/llama_flags.cmake)

# Deal the files of `target` that match `pattern` out to `count` groups, in turn: long files mostly stand together.
# What follows are files that compile alone.
function(kvq_unity target name count pattern)
    if(NOT TARGET ${target}) # LLAMA_BUILD_SERVER=OFF and the like
        return()
    endif()
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources INCLUDE REGEX "${pattern}")
    list(REMOVE_ITEM sources ${ARGN})
    set(next 0)
    foreach(source IN LISTS sources)
        get_filename_component(source ${source} ABSOLUTE BASE_DIR ${folder})
        set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES
            UNITY_GROUP ${name}${next} SKIP_UNITY_BUILD_INCLUSION OFF)
        math(EXPR next "(${next} + 1) % ${count}")
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

function(kvq_unity_targets)
    if(NOT CMAKE_BUILD_TYPE STREQUAL "Release")
        return()
    endif()
    kvq_unity(llama core 6 "^[^/]+\\.cpp$")
    kvq_unity(llama models 6 "/models/[^/]+\\.cpp$")
    # json.cpp and jinja/value.cpp specialize templates that others use before; llguidance.cpp has other content with
    # LLAMA_LLGUIDANCE
    kvq_unity(llama-common common 5 "\\.cpp$" json.cpp jinja/value.cpp llguidance.cpp)
    if(TARGET llama-common)
        set_target_properties(llama-common PROPERTIES UNITY_BUILD_CODE_AFTER_INCLUDE "#undef FILENAME") # jinja's files
    endif()
    # the helper is another library by intention, and must not see the others' headers
    kvq_unity(mtmd mtmd 3 "\\.cpp$" mtmd-helper.cpp mtmd-helper-gen.cpp)
    kvq_unity(server-context server 2 "\\.cpp$")
    kvq_unity(llama-server-impl server 1 "\\.cpp$")
    kvq_unity(llama-cli-impl cli 1 "\\.cpp$")
endfunction()
cmake_language(DEFER CALL kvq_unity_targets)
