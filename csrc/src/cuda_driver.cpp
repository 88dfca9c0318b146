// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>

#include "status.h"

namespace sparkcache::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <typename Pointer>
void resolve(void* library, const char* symbol, Pointer& pointer) {
    void* const found = ::dlsym(library, symbol);
    if (found == nullptr) {
        fail(SPARKCACHE_UNSUPPORTED, "%s has no %s; install a newer driver", kLibrary, symbol);
    }
    pointer = reinterpret_cast<Pointer>(found);
}

}  // namespace

Driver::Driver() {
    // NODELETE: threads of the driver outlive any handle on it.
    void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) {
        fail(SPARKCACHE_UNSUPPORTED, "no CUDA driver: %s", ::dlerror());
    }
#define SPARKCACHE_CUDA_RESOLVE(name, symbol, parameters) resolve(library, symbol, name);
    SPARKCACHE_CUDA_FUNCTIONS(SPARKCACHE_CUDA_RESOLVE)
#undef SPARKCACHE_CUDA_RESOLVE
    if (const Result result = init(0); result != kSuccess) {
        fail(SPARKCACHE_UNSUPPORTED, "cuInit: %s; check the driver and its devices",
             name_of(result));
    }
}

const Driver& Driver::get() {
    // A failed construction is tried again by the next caller, as the driver may come later.
    static const Driver driver;
    return driver;
}

const char* Driver::name_of(Result result) const noexcept {
    const char* name = nullptr;
    if (get_error_name == nullptr || get_error_name(result, &name) != kSuccess ||
        name == nullptr) {
        return "an unknown CUDA error";
    }
    return name;
}

void fail_call(const Driver& driver, Result result, const char* call, const char* file, int line) {
    sparkcache_status status = SPARKCACHE_DEVICE;
    switch (result) {
        case kOutOfMemory:
            status = SPARKCACHE_NO_MEMORY;
            break;
        case kNoDevice:
        case kInvalidDevice:
        case kInvalidImage:
        case kNoBinaryForGpu:
            status = SPARKCACHE_UNSUPPORTED;
            break;
        default:
            break;
    }
    fail(status, "%s (%d) from %s at %s:%d", driver.name_of(result), result, call, file, line);
}

}  // namespace sparkcache::cuda
