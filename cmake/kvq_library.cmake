# kvq-core: formats, methods, cache, kernels; compiles without any ggml header. kvq-host: the ggml backend around it, and
# what GGUF files say. kvq-process: how it finds ggml in a process. ggml-kvq: all three, as libggml-kvq.so. kvq-objects: the
# first two, as an archive for native tests (hidden symbols included), which are linked to ggml.
set(kvq_src ${CMAKE_CURRENT_SOURCE_DIR}/ggml-kvq)
file(GLOB kvq_core_sources CONFIGURE_DEPENDS
    ${kvq_src}/types/*.cpp ${kvq_src}/engine/*.cpp ${kvq_src}/store/*.cpp ${kvq_src}/policy/*.cpp
    ${kvq_src}/methods/*.cpp ${kvq_src}/cache/*.cpp ${kvq_src}/cpu/*.cpp)
file(GLOB kvq_host_sources CONFIGURE_DEPENDS ${kvq_src}/gguf/*.cpp ${kvq_src}/host/*.cpp ${kvq_src}/host/cuda/*.cpp)
file(GLOB kvq_process_sources CONFIGURE_DEPENDS ${kvq_src}/host/process*.cpp ${kvq_src}/host/cuda/process*.cpp)
list(REMOVE_ITEM kvq_host_sources ${kvq_process_sources})
file(GLOB kvq_types_sources CONFIGURE_DEPENDS ${kvq_src}/types/*.cpp)
file(GLOB kvq_kernel_sources CONFIGURE_DEPENDS ${kvq_src}/cpu/kernels_*.cpp)

# Instruction sets: one source file per set, compiled with its flags and called only where the CPU has it.
set(kvq_isa_x86_avx2   -mavx2 -mfma -mf16c)
set(kvq_isa_x86_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c)
set(kvq_isa_x86_amx    ${kvq_isa_x86_avx512} -mamx-tile -mamx-int8)
set(kvq_isa_arm_neon   -march=armv8.2-a+dotprod+fp16)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(kvq_isa_here avx2 avx512)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag("-mamx-tile -mamx-int8" KVQ_COMPILER_HAS_AMX) # GCC from 11 on
    if(KVQ_COMPILER_HAS_AMX AND NOT "${KVQ_AMX}" STREQUAL "OFF")
        list(APPEND kvq_isa_here amx)
    endif()
    set(kvq_isa_family x86)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(kvq_isa_here neon)
    set(kvq_isa_family arm)
else()
    set(kvq_isa_here "")
endif()
foreach(isa avx2 avx512 amx neon)
    set(files ${kvq_core_sources})
    list(FILTER files INCLUDE REGEX "/cpu/[^/]*_${isa}\\.cpp$")
    if(NOT files)
        continue()
    elseif(isa IN_LIST kvq_isa_here)
        set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS "${kvq_isa_${kvq_isa_family}_${isa}}")
        string(TOUPPER ${isa} upper)
        list(APPEND kvq_definitions KVQ_HAVE_${upper}=1)
    else()
        list(REMOVE_ITEM kvq_core_sources ${files})
    endif()
endforeach()

# The numpy reference rounds after every operation; a fused multiply-add would not.
set_property(SOURCE ${kvq_types_sources} ${kvq_kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)

find_package(Threads REQUIRED)
find_package(OpenMP COMPONENTS CXX)

add_library(kvq-flags INTERFACE)
target_compile_options(kvq-flags INTERFACE -Wall -Wextra $<$<BOOL:${KVQ_WERROR}>:-Werror>)
target_compile_definitions(kvq-flags INTERFACE KVQ_VERSION="${KVQ_VERSION}" ${kvq_definitions})
target_include_directories(kvq-flags INTERFACE ${kvq_src} ${kvq_src}/include)
target_link_libraries(kvq-flags INTERFACE Threads::Threads)
if(OpenMP_CXX_FOUND)
    target_link_libraries(kvq-flags INTERFACE OpenMP::OpenMP_CXX)
else()
    message(WARNING "no OpenMP: the kernels of libggml-kvq will run on one thread; install libgomp or libomp headers")
endif()
if(KVQ_SANITIZE)
    if(NOT KVQ_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
        message(FATAL_ERROR "KVQ_SANITIZE=${KVQ_SANITIZE}: give address, undefined, address,undefined or thread")
    endif()
    # GCC's own checks make it take initialised variables for others: that warning means nothing here
    target_compile_options(kvq-flags INTERFACE -fsanitize=${KVQ_SANITIZE} -fno-omit-frame-pointer -g1
        $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    target_link_options(kvq-flags INTERFACE -fsanitize=${KVQ_SANITIZE})
endif()

add_library(kvq-core OBJECT ${kvq_core_sources})
target_link_libraries(kvq-core PRIVATE kvq-flags)
add_library(kvq-host OBJECT ${kvq_host_sources})
add_library(kvq-process OBJECT ${kvq_process_sources})
foreach(part kvq-host kvq-process)
    target_link_libraries(${part} PRIVATE kvq-flags)
    target_include_directories(${part} SYSTEM PRIVATE
        ${LLAMA_CPP_DIR}/ggml/include ${LLAMA_CPP_DIR}/ggml/src ${LLAMA_CPP_DIR}/include)
    target_compile_definitions(${part} PRIVATE
        KVQ_GGML_VERSION="${KVQ_GGML_VERSION}" GGML_BACKEND_DL GGML_BACKEND_SHARED GGML_SHARED LLAMA_SHARED)
endforeach()

# CUDA kernels and the devices over ggml-cuda
if(GGML_CUDA)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        # cards that people have, as far as this nvcc knows them; the last one's PTX is for those that come
        find_program(kvq_nvcc NAMES "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" nvcc)
        set(known "")
        if(kvq_nvcc)
            execute_process(COMMAND ${kvq_nvcc} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
        endif()
        set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real)
        foreach(arch 100 120)
            if(known MATCHES "compute_${arch}")
                list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch}-real)
            endif()
        endforeach()
        list(POP_BACK CMAKE_CUDA_ARCHITECTURES last)
        string(REPLACE "-real" "" last "${last}")
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${last})
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 17)
    file(GLOB kvq_cuda_sources CONFIGURE_DEPENDS ${kvq_src}/cuda/*.cu ${kvq_src}/cuda/*/*.cu)
    include(${CMAKE_CURRENT_LIST_DIR}/cuda_instances.cmake)
    kvq_cuda_instances(kvq_cuda_instances ${CMAKE_CURRENT_BINARY_DIR}/cuda_instances)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${kvq_src}/cuda/walk/instances.inc)
    # Sealing rounds as types/affine.cpp does: no fused multiply-add in this folder.
    file(GLOB kvq_cuda_seal CONFIGURE_DEPENDS ${kvq_src}/cuda/seal/*.cu)
    set_source_files_properties(${kvq_cuda_seal} PROPERTIES COMPILE_OPTIONS -fmad=false)
    find_path(kvq_cublas_include cublas_v2.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    if(NOT kvq_cublas_include) # upstream's header, which cuda_stream.cu reads, includes it; nothing of ours calls it
        set_source_files_properties(${kvq_src}/host/cuda/cuda_stream.cu PROPERTIES
            INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/without_cublas)
    endif()
    add_library(kvq-cuda OBJECT ${kvq_cuda_sources} ${kvq_cuda_instances} ${kvq_src}/host/cuda/cuda_stream.cu)
    target_include_directories(kvq-cuda PRIVATE ${kvq_src} ${kvq_src}/include)
    target_include_directories(kvq-cuda SYSTEM PRIVATE ${LLAMA_CPP_DIR}/ggml/include ${LLAMA_CPP_DIR}/ggml/src)
    target_link_libraries(kvq-cuda PRIVATE CUDA::cudart)
    # Kernels for six architectures resemble each other: packed for size they take a ninth. Drivers of CUDA 13 unpack them.
    if(CMAKE_CUDA_COMPILER_ID STREQUAL NVIDIA AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
        target_compile_options(kvq-cuda PRIVATE --compress-mode=size)
    endif()
    target_compile_definitions(kvq-flags INTERFACE KVQ_CUDA)
    target_link_libraries(kvq-flags INTERFACE CUDA::cudart)
    set(kvq_cuda_objects $<TARGET_OBJECTS:kvq-cuda>)
else()
    set(kvq_cuda_objects "")
endif()

# libggml-kvq.so needs no library of ggml: it finds the one that loads it (host/process.cpp). A call that is not in
# host/ggml_functions.inc is an undefined name, which ends the link here. (Sanitizers leave names of their own open.)
add_library(ggml-kvq MODULE
    $<TARGET_OBJECTS:kvq-core> $<TARGET_OBJECTS:kvq-host> $<TARGET_OBJECTS:kvq-process> ${kvq_cuda_objects})
target_link_libraries(ggml-kvq PRIVATE kvq-flags ${CMAKE_DL_LIBS})
target_link_options(ggml-kvq PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map)
if(NOT KVQ_SANITIZE)
    target_link_options(ggml-kvq PRIVATE -Wl,--no-undefined)
endif()
set_property(TARGET ggml-kvq PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/exports.map)
set_target_properties(ggml-kvq PROPERTIES
    PREFIX lib SUFFIX .so LINKER_LANGUAGE CXX
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/lib
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")

add_library(kvq-objects STATIC EXCLUDE_FROM_ALL $<TARGET_OBJECTS:kvq-core> $<TARGET_OBJECTS:kvq-host> ${kvq_cuda_objects}
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/native/linked/process.cpp)
target_link_libraries(kvq-objects PUBLIC kvq-flags ${CMAKE_DL_LIBS})
