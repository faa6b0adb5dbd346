// Calls of ggml's functions end in stubs of the same names, which jump through one pointer each. The pointers are set
// when ggml loads us. Programs that read a GGUF file through our C ABI, and load no backend, reach a stub before that:
// its pointer then leads to a function that binds, first to a ggml of the process, else to libggml-base beside us.
//   Native tests are linked to ggml itself: tests/native/linked/process.cpp stands in for this file.
#include "process.h"

#include "backend.h"
#include "gguf.h"

#include <cstring>
#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <mutex>
#include <set>
#include <sys/auxv.h>

// ---------------------------------------------------------------- stubs

#define KVQ_GGML_OPTIONAL(name)
#if defined(__x86_64__)
#define KVQ_GGML(name)                                                                                                 \
    extern "C" __attribute__((visibility("hidden"))) void * kvq_at_##name;                                             \
    asm(".pushsection .text\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name                  \
        ":\n.byte 0xf3, 0x0f, 0x1e, 0xfa\njmp *kvq_at_" #name "(%rip)\n.size " #name ", .-" #name                      \
        "\n.popsection\n"); // endbr64
#elif defined(__aarch64__)
#define KVQ_GGML(name)                                                                                                 \
    extern "C" __attribute__((visibility("hidden"))) void * kvq_at_##name;                                             \
    asm(".pushsection .text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" #name                  \
        ":\nhint #34\nadrp x16, kvq_at_" #name "\nldr x16, [x16, #:lo12:kvq_at_" #name "]\nbr x16\n.size " #name       \
        ", .-" #name "\n.popsection\n"); // bti c
#else
#error "stubs of ggml's functions: write the jump through a pointer for this processor here"
#endif
#include "ggml_functions.inc"
#undef KVQ_GGML

namespace {

bool bind_late(const char * wanted);

// What a pointer leads to until it is bound.
template <typename F> struct late;
template <typename R, typename... A> struct late<R (*)(A...)> {
    template <void ** at, const char * name> static R call(A... a) {
        return bind_late(name) ? ((R (*)(A...)) *at)(a...) : R();
    }
};

#ifdef KVQ_CUDA // variadic: its message is lost when it is called before anything is bound
template <> struct late<decltype(&ggml_abort)> {
    template <void ** at, const char * name> static void call(const char *, int, const char *, ...) { abort(); }
};
#endif

} // namespace

#define KVQ_GGML(name)                                                                                                 \
    static constexpr char name_of_##name[] = #name;                                                                    \
    void * kvq_at_##name = (void *) &late<decltype(&name)>::call<&kvq_at_##name, name_of_##name>;
#include "ggml_functions.inc"
#undef KVQ_GGML
#undef KVQ_GGML_OPTIONAL

namespace {

struct function {
    const char * name;
    void ** at;
};
const function needed[] = {
#define KVQ_GGML(name) { #name, &kvq_at_##name },
#define KVQ_GGML_OPTIONAL(name)
#include "ggml_functions.inc"
#undef KVQ_GGML
#undef KVQ_GGML_OPTIONAL
};

// ---------------------------------------------------------------- objects of the process

// The first function of libggml, which keeps the list of backends, and of libggml-base.
constexpr const char * REGISTER = "ggml_backend_register";
constexpr const char * BASE = "ggml_version";
// What the loader of backends asks a library for: an object with these letters in it has that loader.
constexpr const char * LOADER = "ggml_backend_score";

struct object {
    std::string file; // "": the program itself
    const void * base = nullptr;
    void * handle = nullptr;
};

const void * base_of(const void * address) {
    Dl_info info;
    return address && dladdr(address, &info) ? info.dli_fbase : nullptr;
}

std::string file_of(const void * address) {
    Dl_info info;
    return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "the program";
}

// Handles stay open: what we are bound to must not go before us.
object object_at(const void * address) {
    object o;
    o.base = base_of(address);
    o.file = file_of(address);
    if (o.base && o.base == base_of((const void *) getauxval(AT_PHDR))) {
        o.handle = dlopen(nullptr, RTLD_LAZY);
    } else if (o.base) {
        o.handle = dlopen(o.file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    }
    return o;
}

bool holds_loader(const object & o) {
    struct search {
        const object & o;
        bool found;
    } s = { o, false };
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * data) {
            search & s = *(search *) data;
            bool ours = false;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr) & p = info->dlpi_phdr[i];
                ours |= p.p_type == PT_LOAD && base_of((const void *) (info->dlpi_addr + p.p_vaddr)) == s.o.base;
            }
            for (int i = 0; ours && i < info->dlpi_phnum; i++) {
                const ElfW(Phdr) & p = info->dlpi_phdr[i];
                if (p.p_type == PT_LOAD && (p.p_flags & PF_R) && !s.found) {
                    s.found =
                        memmem((const void *) (info->dlpi_addr + p.p_vaddr), p.p_filesz, LOADER, strlen(LOADER) + 1);
                }
            }
            return ours ? 1 : 0;
        },
        &s);
    return s.found;
}

// Every object of the process that defines `name`, ours not among them.
std::vector<object> holders_of(const char * name) {
    std::vector<std::string> files;
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * data) {
            ((std::vector<std::string> *) data)->push_back(info->dlpi_name);
            return 0;
        },
        &files);
    std::vector<object> out;
    std::set<const void *> seen;
    for (const std::string & file : files) {
        void * handle = dlopen(file.empty() ? nullptr : file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        void * at = handle ? dlsym(handle, name) : nullptr;
        if (at && seen.insert(base_of(at)).second) {
            out.push_back(object_at(at));
        } else if (handle) {
            dlclose(handle);
        }
    }
    return out;
}

// ---------------------------------------------------------------- binding

enum class bound { NO, LATE, LOADED };
struct {
    std::recursive_mutex mutex; // a stub may be reached while the process' objects are looked at
    bound how = bound::NO;
    const void * base = nullptr; // where libggml-base lies
    void * handle = nullptr;     // of the object whose dependencies were searched
    std::string file;
} here;

// All functions from the one object in the tree of `o` that has the first; nothing is bound unless all are there.
bool bind_to(const object & o, bound how, std::string & err) {
    const void * version = dlsym(o.handle, BASE);
    const void * base = base_of(version);
    if (here.how == bound::LOADED && here.base != base) {
        err = "libggml-kvq.so serves the ggml of " + here.file + " in this process: that of " + file_of(version) +
            " needs a copy of the file";
        return false;
    }
    std::vector<void *> found;
    for (const function & f : needed) {
        void * at = dlsym(o.handle, f.name);
        if (!at || base_of(at) != base) {
            err = std::string("ggml ") + (version ? ((const char * (*)(void) ) version)() : "(no version)") + " in " +
                file_of(version) + " has no function " + f.name +
                ", which libggml-kvq.so calls: use a llama.cpp that " + "README.md names";
            return false;
        }
        found.push_back(at);
    }
    for (size_t i = 0; i < found.size(); i++) { *needed[i].at = found[i]; }
    here.how = how;
    here.base = base;
    here.handle = o.handle;
    here.file = file_of(version);
    return true;
}

// Before any ggml has loaded us: readers of GGUF files, and programs that link us (ggml-kvq-graph.h).
bool bind_late(const char * wanted) {
    const std::lock_guard<std::recursive_mutex> lock(here.mutex);
    if (here.how != bound::NO) { return true; }
    std::string err = "none is in this process, and none lies beside libggml-kvq.so";
    for (const object & o : holders_of(BASE)) {
        if (bind_to(o, bound::LATE, err)) { return true; }
    }
    const std::string own = file_of((const void *) &bind_late);
    glob_t beside = {};
    glob((own.substr(0, own.rfind('/') + 1) + "libggml-base.so*").c_str(), 0, nullptr, &beside);
    for (size_t i = 0; i < beside.gl_pathc && here.how == bound::NO; i++) {
        object o;
        o.handle = dlopen(beside.gl_pathv[i], RTLD_LAZY | RTLD_LOCAL);
        if (o.handle) { bind_to(o, bound::LATE, err); }
    }
    globfree(&beside);
    if (here.how == bound::NO) { kvq_report_error(std::string(wanted) + " needs a libggml-base: " + err); }
    return here.how != bound::NO;
}

} // namespace

bool kvq_bind_ggml(const void * caller, std::string & err) {
    const std::lock_guard<std::recursive_mutex> lock(here.mutex);
    const object from = object_at(caller);
    if (from.handle && dlsym(from.handle, REGISTER) && dlsym(from.handle, BASE)) {
        return bind_to(from, bound::LOADED, err);
    }
    if (holds_loader(from)) {
        err = from.file + " holds ggml and shows none of its functions (" + REGISTER + ", " + BASE +
            "): a llama.cpp with shared libraries is needed (BUILD_SHARED_LIBS=ON)";
        return false;
    }
    const std::vector<object> all = holders_of(REGISTER); // called by one that is no ggml
    if (all.size() == 1) { return bind_to(all[0], bound::LOADED, err); }
    err = all.empty() ? "no ggml is in this process: libggml-kvq.so is loaded by llama.cpp (GGML_BACKEND_PATH)"
                      : "both " + all[0].file + " and " + all[1].file +
            " hold ggml: load libggml-kvq.so with ggml_backend_load of the one that it shall serve";
    return false;
}

void * kvq_optional_function(const char * name) {
    const std::lock_guard<std::recursive_mutex> lock(here.mutex);
    return here.handle ? dlsym(here.handle, name) : nullptr;
}

std::string kvq_ggml_file(void) {
    const std::lock_guard<std::recursive_mutex> lock(here.mutex);
    return here.file;
}
