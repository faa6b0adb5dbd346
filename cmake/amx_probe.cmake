# Can the compiler be trusted with AMX? ldtilecfg reads 64 bytes of memory. In GCC 12.2 the intrinsic
# _tile_loadconfig names only the first 8 bytes as its operand: the compiler drops the stores to the others, the
# instruction reads garbage, and every program of llama.cpp dies at its first product on a CPU that has AMX.
#
# The probe compiles the pattern three times to assembly: as it is, with another row count, with another column
# count. Assembly that does not change with the value that is stored holds no such store. No CPU with AMX is needed,
# and no list of versions.

# kvq_amx_probe(<variable> <compiler> <flags>): right, dropped, or none (not x86-64, or a compiler that knows no AMX).
function(kvq_amx_probe result compiler flags)
    set(${result} none PARENT_SCOPE)
    string(RANDOM LENGTH 8 unique)
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/amx-probe-${unique})
    separate_arguments(flags UNIX_COMMAND "${flags}")
    foreach(case "base 16 64" "rows 8 64" "columns 16 32")
        separate_arguments(case UNIX_COMMAND "${case}")
        list(GET case 0 name)
        list(GET case 1 rows)
        list(GET case 2 columns)
        file(WRITE ${folder}/${name}/probe.cpp "#ifdef __x86_64__
#include <immintrin.h>
struct tile_config {
    unsigned char  palette, start_row, reserved[14];
    unsigned short columns[16]; // bytes of a row
    unsigned char  rows[16];
};
void kvq_load_tiles() {
    tile_config c = {};
    c.palette = 1;
    for (int i = 0; i < 8; i++) {
        c.rows[i]    = ${rows};
        c.columns[i] = ${columns};
    }
    _tile_loadconfig(&c);
}
#else
#error not x86-64
#endif
")
        execute_process(COMMAND ${compiler} ${flags} -mamx-tile -mamx-int8 -O2 -g0 -fno-lto -S probe.cpp -o probe.s
            WORKING_DIRECTORY ${folder}/${name} RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
        if(failed OR NOT EXISTS ${folder}/${name}/probe.s)
            file(REMOVE_RECURSE ${folder})
            return()
        endif()
        file(READ ${folder}/${name}/probe.s ${name})
    endforeach()
    file(REMOVE_RECURSE ${folder})
    if(NOT base MATCHES "ldtilecfg")
        return()
    elseif(base STREQUAL rows OR base STREQUAL columns)
        set(${result} dropped PARENT_SCOPE)
    else()
        set(${result} right PARENT_SCOPE)
    endif()
endfunction()

# kvq_accepts(<variable> <compiler> <flags>): whether the compiler knows them.
function(kvq_accepts result compiler flags)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    execute_process(COMMAND ${compiler} ${flags} -x c -fsyntax-only /dev/null
        RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
        set(${result} OFF PARENT_SCOPE)
    else()
        set(${result} ON PARENT_SCOPE)
    endif()
endfunction()

# kvq_defines(<variable> <compiler> <flags> <pattern>): whether the compiler defines such a macro with these flags.
function(kvq_defines result compiler flags pattern)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    execute_process(COMMAND ${compiler} ${flags} -x c++ -E -dM /dev/null
        OUTPUT_VARIABLE macros RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed AND macros MATCHES "${pattern}")
        set(${result} ON PARENT_SCOPE)
    else()
        set(${result} OFF PARENT_SCOPE)
    endif()
endfunction()
