# Sources of the kernels that are compiled apart: for each row of ggml-kvq/cuda/walk/instances.inc one file, made of
# instance.cu.in. Without a configured build, for tests and scripts/gpu_check.sh:
#   cmake -DOUT=<folder> -P cmake/cuda_instances.cmake
set(kvq_cuda_instances_in ${CMAKE_CURRENT_LIST_DIR}/../ggml-kvq/cuda/walk)

# kvq_cuda_instances(<variable> <folder>): writes them there; the variable gets their paths. Sources of rows that are gone
# are removed. What has not changed is not written again.
function(kvq_cuda_instances result folder)
    file(STRINGS ${kvq_cuda_instances_in}/instances.inc rows REGEX "^[^/]")
    set(files "")
    foreach(row IN LISTS rows)
        if(NOT row MATCHES "^KVQ_LAUNCH\\(([a-z0-9_]+), ([a-z_]+), (.+)\\)$")
            message(FATAL_ERROR "instances.inc: ${row}: a row is KVQ_LAUNCH(name, header, function)")
        endif()
        set(name ${CMAKE_MATCH_1})
        set(header ${CMAKE_MATCH_2})
        set(function "${CMAKE_MATCH_3}")
        configure_file(${kvq_cuda_instances_in}/instance.cu.in ${folder}/attend_${name}.cu @ONLY)
        list(APPEND files ${folder}/attend_${name}.cu)
    endforeach()
    file(GLOB old ${folder}/attend_*.cu)
    list(REMOVE_ITEM old ${files})
    if(old)
        file(REMOVE ${old})
    endif()
    set(${result} ${files} PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
    if(NOT OUT)
        message(FATAL_ERROR "usage: cmake -DOUT=<folder> -P cmake/cuda_instances.cmake")
    endif()
    get_filename_component(OUT "${OUT}" ABSOLUTE)
    kvq_cuda_instances(files ${OUT})
endif()
