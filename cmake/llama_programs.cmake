# llama-programs: upstream's programs and the libraries they need, built unmodified from LLAMA_CPP_DIR in a build folder of
# their own and staged into ${KVQ_STAGE}. For the pinned source the build folder lives in the cache, keyed by everything that
# decides its content, so that a second install takes seconds; for a foreign tree it lives in this build folder.
set(KVQ_PROGRAMS llama-cli llama-completion llama-server llama-bench llama-perplexity ggml-rpc-server
    CACHE STRING "targets of llama.cpp that are built; the wheel needs all of them")
set(KVQ_STAGE ${CMAKE_CURRENT_BINARY_DIR}/lib)

set(settings "")
function(kvq_setting name value)
    string(APPEND settings "set(${name} [==[${value}]==] CACHE STRING \"\" FORCE)\n")
    set(settings "${settings}" PARENT_SCOPE)
endfunction()
# cc and gcc, or c++ and g++, are mostly one compiler: one name, one build. scikit-build-core passes the one Python was built with.
foreach(pair C:cc CXX:c++)
    string(REPLACE ":" ";" pair ${pair})
    list(GET pair 0 language)
    list(GET pair 1 generic)
    set(compiler_${language} ${CMAKE_${language}_COMPILER})
    find_program(kvq_${language}_generic ${generic})
    if(kvq_${language}_generic)
        file(REAL_PATH ${kvq_${language}_generic} real_generic)
        file(REAL_PATH ${CMAKE_${language}_COMPILER} real_chosen)
        if(real_generic STREQUAL real_chosen)
            set(compiler_${language} ${kvq_${language}_generic})
        endif()
    endif()
endforeach()
foreach(name CMAKE_BUILD_TYPE CMAKE_C_COMPILER CMAKE_CXX_COMPILER CMAKE_C_FLAGS CMAKE_CXX_FLAGS CMAKE_EXE_LINKER_FLAGS
             CMAKE_SHARED_LINKER_FLAGS CMAKE_TOOLCHAIN_FILE)
    if(name MATCHES "^CMAKE_(C|CXX)_COMPILER$")
        kvq_setting(${name} "${compiler_${CMAKE_MATCH_1}}")
    elseif(DEFINED ${name})
        kvq_setting(${name} "${${name}}")
    endif()
endforeach()
# What the user chose for CUDA; ggml-cuda has its own defaults (all architectures: most of an hour on few cores).
foreach(name CMAKE_CUDA_ARCHITECTURES CMAKE_CUDA_COMPILER CMAKE_CUDA_HOST_COMPILER CMAKE_CUDA_FLAGS)
    if(GGML_CUDA AND DEFINED CACHE{${name}})
        kvq_setting(${name} "$CACHE{${name}}")
    endif()
endforeach()
# Some toolchains have no shared libstdc++: every library then carries a copy of what it uses and shows it to the others. Programs put
# them all into one scope, but Python opens one library after the other, and a stream made by one copy and printed through another
# crashes. Copies that nobody else sees do not mix.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/stand-in/stream.cpp "#include <iostream>\nvoid kvq_stream(int x) { std::cout << x; }\n")
separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS} ${CMAKE_SHARED_LINKER_FLAGS}")
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -shared -fPIC stream.cpp -o libstream.so ${flags}
    WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/stand-in RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
if(NOT failed AND NOT APPLE)
    file(STRINGS ${CMAKE_CURRENT_BINARY_DIR}/stand-in/libstream.so shared_library REGEX "lib(std)?c\\+\\+\\.so" LIMIT_COUNT 1)
    if(NOT shared_library)
        message(STATUS "libstdc++ is linked statically: its copies stay private to each library")
        foreach(kind SHARED EXE)
            kvq_setting(CMAKE_${kind}_LINKER_FLAGS "${CMAKE_${kind}_LINKER_FLAGS} -Wl,--exclude-libs,libstdc++.a:libstdc++fs.a:libsupc++.a")
        endforeach()
    endif()
endif()
kvq_setting(BUILD_SHARED_LIBS ON)
kvq_setting(GGML_RPC ON) # layers on other machines: --rpc in the programs, ggml-rpc-server there
kvq_setting(GGML_RPC_RDMA OFF) # else a machine that has libibverbs makes programs that need it
kvq_setting(CMAKE_INSTALL_RPATH "\$ORIGIN")
kvq_setting(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
foreach(off LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_APP LLAMA_BUILD_UI LLAMA_USE_PREBUILT_UI LLAMA_OPENSSL
            LLAMA_ALL_WARNINGS GGML_CCACHE)
    kvq_setting(${off} OFF)
endforeach()
if(KVQ_LLAMA_PINNED)
    # Upstream asks git, which would find whatever repository the cache happens to lie in.
    file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_llama_cpp.py commit REGEX "^COMMIT = ")
    string(REGEX MATCH "[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]" commit "${commit}")
    kvq_setting(LLAMA_BUILD_COMMIT ${commit})
endif()
include(${CMAKE_CURRENT_LIST_DIR}/llama_cpu.cmake) # kvq_llama_dl, kvq_cpu_note, kvq_amx_note
# What the user sets for llama.cpp (-DGGML_NATIVE=OFF, -DLLAMA_OPENSSL=ON, ...) comes last and wins.
get_cmake_property(cache_names CACHE_VARIABLES)
foreach(name IN LISTS cache_names)
    if(name MATCHES "^(GGML|LLAMA)_" AND NOT name STREQUAL "LLAMA_CPP_DIR")
        kvq_setting(${name} "${${name}}")
    endif()
endforeach()

# Files that are compiled together save a third of the first build; only of the pinned source is it known which can be.
option(KVQ_LLAMA_UNITY "compile several files of the pinned llama.cpp at a time; OFF takes longer and less memory" ON)
set(flags_path ${CMAKE_CURRENT_LIST_DIR}/llama_flags.cmake)
file(READ ${flags_path} flags_file)
if(KVQ_LLAMA_PINNED AND KVQ_LLAMA_UNITY)
    set(flags_path ${CMAKE_CURRENT_LIST_DIR}/llama_unity.cmake) # includes the other
    file(READ ${flags_path} unity_file)
    string(APPEND flags_file "${unity_file}")
endif()
set(cpu_flags_path "")
if(settings MATCHES "KVQ_CPU_FLAGS") # x86-64
    set(cpu_flags_path ${CMAKE_CURRENT_LIST_DIR}/llama_cpu_flags.cmake)
elseif(settings MATCHES "KVQ_WITHOUT_SME") # AArch64
    set(cpu_flags_path ${CMAKE_CURRENT_LIST_DIR}/llama_arm_flags.cmake)
endif()
if(cpu_flags_path)
    file(READ ${cpu_flags_path} cpu_flags_file)
    string(APPEND flags_file "${cpu_flags_file}")
endif()
set(identity "${settings}${flags_file}${CMAKE_GENERATOR} ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} $ENV{CFLAGS} $ENV{CXXFLAGS} $ENV{LDFLAGS}")
# Tools of two versions (the system's and pip's) that take turns in one folder compile everything anew each time: ninja's
# log of commands has another format and other hashes since 1.12.
execute_process(COMMAND ${CMAKE_MAKE_PROGRAM} --version OUTPUT_VARIABLE make_version ERROR_QUIET)
string(REGEX MATCH "^[^\n]*" make_version "${make_version}")
string(APPEND identity " cmake ${CMAKE_VERSION} ${make_version}")
# GGML_NATIVE compiles for the CPU at hand; a cache shared between machines must not mix them.
if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo cpu_lines REGEX "^(flags|Features|model name)" LIMIT_COUNT 2)
    string(APPEND identity "${cpu_lines}")
endif()
string(SHA256 key "${identity}")
string(SUBSTRING ${key} 0 12 key)

set(KVQ_LLAMA_BUILD "" CACHE PATH "build folder of llama.cpp, to which the key is added; empty: the cache or this folder")
if(KVQ_LLAMA_BUILD)
    set(llama_build ${KVQ_LLAMA_BUILD}-${key})
elseif(KVQ_LLAMA_PINNED)
    get_filename_component(cache_dir ${LLAMA_CPP_DIR} DIRECTORY)
    set(llama_build ${cache_dir}/build-${commit}-${key})
else()
    set(llama_build ${CMAKE_CURRENT_BINARY_DIR}/llama.cpp)
endif()
set(settings_file ${CMAKE_CURRENT_BINARY_DIR}/llama_settings.cmake)
string(APPEND settings "set(CMAKE_MAKE_PROGRAM [==[${CMAKE_MAKE_PROGRAM}]==] CACHE FILEPATH \"\" FORCE)\n"
    "set(CMAKE_PROJECT_llama.cpp_INCLUDE [==[${flags_path}]==] CACHE FILEPATH \"\" FORCE)\n")
if(cpu_flags_path)
    string(APPEND settings "set(CMAKE_PROJECT_ggml_INCLUDE [==[${cpu_flags_path}]==] CACHE FILEPATH \"\" FORCE)\n")
endif()
file(CONFIGURE OUTPUT ${settings_file} CONTENT "${settings}" @ONLY)
message(STATUS "llama.cpp build folder: ${llama_build}")

set(kvq_upstream ggml-base ggml llama)
if(NOT kvq_llama_dl) # else a module, which nothing is linked to
    list(APPEND kvq_upstream ggml-cpu)
endif()
set(imported "")
foreach(name IN LISTS kvq_upstream)
    list(APPEND imported ${KVQ_STAGE}/lib${name}.so.${KVQ_GGML_SOVERSION})
endforeach()
string(REPLACE ";" "," programs "${KVQ_PROGRAMS}")
add_custom_target(llama-programs ALL
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${LLAMA_CPP_DIR} -DBUILD=${llama_build} -DSETTINGS=${settings_file} -DSTAGE=${KVQ_STAGE}
            -DGENERATOR=${CMAKE_GENERATOR} -DPROGRAMS=${programs} -P ${CMAKE_CURRENT_LIST_DIR}/build_llama.cmake
    BYPRODUCTS ${imported}
    COMMENT "llama.cpp: ${programs} (many minutes the first time)"
    USES_TERMINAL VERBATIM)

foreach(name IN LISTS kvq_upstream)
    add_library(upstream-${name} SHARED IMPORTED)
    set_target_properties(upstream-${name} PROPERTIES
        IMPORTED_LOCATION ${KVQ_STAGE}/lib${name}.so.${KVQ_GGML_SOVERSION} IMPORTED_SONAME lib${name}.so.${KVQ_GGML_SOVERSION}
        INTERFACE_INCLUDE_DIRECTORIES "${LLAMA_CPP_DIR}/ggml/include;${LLAMA_CPP_DIR}/include")
    add_dependencies(upstream-${name} llama-programs)
endforeach()
if(kvq_llama_dl)
    add_library(upstream-ggml-cpu INTERFACE)
endif()

include(${CMAKE_CURRENT_LIST_DIR}/self_check.cmake) # kvq_check_note

# What `python -m ggml_kvq` tells of the build, in lines of "key: value".
file(WRITE ${KVQ_STAGE}/build-info.txt "compiler: ${kvq_compiler}
cpu: ${kvq_cpu_note}
amx: ${kvq_amx_note}
self-check: ${kvq_check_note}
")

if(KVQ_BUILD_PROGRAMS)
    install(DIRECTORY ${KVQ_STAGE}/ DESTINATION lib USE_SOURCE_PERMISSIONS PATTERN libggml-kvq.so EXCLUDE)
    install(FILES ${LLAMA_CPP_DIR}/LICENSE DESTINATION lib RENAME LICENSE.llama.cpp)
    # what llama.cpp has compiled in: scripts/make_sbom.py lists it
    foreach(pair vendor/cpp-httplib/LICENSE:cpp-httplib licenses/LICENSE-jsonhpp:nlohmann-json vendor/hash/sha256/LICENSE:sha256
                 vendor/hash/xxhash/LICENSE:xxhash vendor/hash/rotate-bits/LICENSE.md:rotate-bits)
        string(REPLACE ":" ";" pair ${pair})
        list(GET pair 0 file)
        list(GET pair 1 name)
        if(EXISTS ${LLAMA_CPP_DIR}/${file}) # older trees lack some
            install(FILES ${LLAMA_CPP_DIR}/${file} DESTINATION lib RENAME LICENSE.${name})
        endif()
    endforeach()
    # notices that stand in source files alone
    set(kvq_sgemm ${LLAMA_CPP_DIR}/ggml/src/ggml-cpu/llamafile/sgemm.cpp)
    if(EXISTS ${kvq_sgemm})
        file(READ ${kvq_sgemm} kvq_notice LIMIT 2048)
        string(REGEX MATCH "^(//[^\n]*\n)+" kvq_notice "${kvq_notice}")
        file(STRINGS ${LLAMA_CPP_DIR}/ggml/src/ggml-cpu/ops.cpp kvq_yarn REGEX "^// MIT licensed. Copyright")
        file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/LICENSE.ggml-cpu "ggml/src/ggml-cpu/llamafile/sgemm.cpp:\n\n${kvq_notice}\n"
             "YaRN in ggml/src/ggml-cpu/ops.cpp, under the same terms:\n\n${kvq_yarn}\n")
        install(FILES ${CMAKE_CURRENT_BINARY_DIR}/LICENSE.ggml-cpu DESTINATION lib)
    endif()
endif()
