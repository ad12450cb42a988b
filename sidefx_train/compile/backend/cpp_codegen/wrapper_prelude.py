"""Wrapper prelude: what the function that calls the kernels needs of torch, Python and C++, without their headers.

Reading Inductor's own header for it takes a second, and the compiler uses a hundredth of it; those of Python and of the
standard library take longer than everything else. The functions of torch's C interface that a wrapper uses are declared
as in torch's headers; the few C++ helpers around them are defined here. A wrapper that needs more is compiled with
torch's header.
"""

from __future__ import annotations

import re
from functools import lru_cache

from sidefx_train import torch_compat as compat

_NEEDED = (
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_size",
    "aoti_torch_get_stride",
    "aoti_torch_get_storage_offset",
    *(f"aoti_torch_scalar_to_tensor_{name}" for name in ("float32", "float64", "int32", "int64", "bool")),
    "aoti_torch__reinterpret_tensor",
)
"""Functions that the helpers call."""

_BEYOND = re.compile(
    r"\b(py|pybind11|at|c10|torch|std)::(\w+)|\b(PyObject|RAIIPyObject|ConstantHandle|ArrayRefTensor)\b"
)
_NARROW = re.compile(r"\bat::(?:BFloat16|Half)\*")
"""Pointers that kernels take: the wrapper passes them on, whatever they point to."""
_KNOWN = {
    *("py::gil_scoped_release_simple", "std::move", "std::array", "std::numeric_limits"),
    *("std::max", "std::min", "std::abs", "c10::div_floor_integer", "c10::div_mod"),
}
_DECLARATIONS = re.compile(r"(?m)^[ \t]*#include <torch/csrc/(?:inductor/aoti_torch|stable/c)/[^>\n]*>\n")

FAILURE = """
#ifndef SIDEFX_FAILURE
#define SIDEFX_FAILURE
struct SidefxFailure {
    char text[1024];
};
#endif
"""
"""What a wrapper throws, and the Python entry point catches."""

INTEGER_DIVISION = """
namespace c10 {

template <class T> inline T div_floor_integer(T a, T b) {
    if (b == 0) return 0;
    if (b == T(-1)) return T(0 - uint64_t(a));  // the processor's division overflows
    const T quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
inline int64_t div_mod(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    const int64_t rest = a % b;
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}

}  // namespace c10
"""
"""Divisions of indices, in wrappers and in kernels."""

_PRELUDE = r"""
#include <@TYPES@>

typedef uint64_t StableIValue;
typedef struct StableListOpaque* StableListHandle;
typedef struct StringOpaque* StringHandle;

extern "C" {
@DECLARED@
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace lean {  // replacements of std

template <class T> struct Bare { typedef T type; };
template <class T> struct Bare<T&> { typedef T type; };
template <class T> inline typename Bare<T>::type&& move(T&& given) noexcept {
    return static_cast<typename Bare<T>::type&&>(given);
}
template <class T, decltype(sizeof(0)) N> struct array {
    T items[N];
    T* data() { return items; }
    const T* data() const { return items; }
    const T* cbegin() const { return items; }
    const T* cend() const { return items + N; }
    decltype(N) size() const { return N; }
};
template <class T> struct numeric_limits;
template <> struct numeric_limits<double> {
    static constexpr double infinity() { return __builtin_inf(); }
    static constexpr double quiet_NaN() { return __builtin_nan(""); }
};
template <> struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T, decltype(sizeof(0)) N> inline T max(const T (&items)[N]) {
    T most = items[0];
    for (const T& item : items) most = max(most, item);
    return most;
}
template <class T, decltype(sizeof(0)) N> inline T min(const T (&items)[N]) {
    T least = items[0];
    for (const T& item : items) least = min(least, item);
    return least;
}
inline int64_t abs(int64_t x) { return x < 0 ? -x : x; }

}  // namespace lean

namespace {
@INTEGER_DIVISION@
}  // namespace

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

@FAILURE@
[[gnu::noinline, gnu::cold, noreturn]] static void sidefx_fail(const char* call) {
    SidefxFailure failure;
    __builtin_snprintf(failure.text, sizeof failure.text, "%s API call failed", call);
    throw failure;
}

#define AOTI_TORCH_ERROR_CODE_CHECK(call) \
    if (__builtin_expect((call) != 0, 0)) sidefx_fail(#call)
#define CACHE_TORCH_DTYPE(name) static const auto cached_torch_dtype_##name = aoti_torch_dtype_##name()
#define CACHE_TORCH_DEVICE(name) static const auto cached_torch_device_type_##name = aoti_torch_device_type_##name()
#define CACHE_TORCH_LAYOUT(name) static const auto cached_torch_layout_##name = aoti_torch_layout_##name()
#define CACHE_TORCH_MEMORY_FORMAT(name) \
    static const auto cached_torch_memory_format_##name = aoti_torch_memory_format_##name()

// Owns one tensor. Functions used hundreds of times in one wrapper are not inlined: it would take seconds to compile.
class RAIIAtenTensorHandle {
    AtenTensorHandle held = nullptr;

public:
    RAIIAtenTensorHandle() = default;
    RAIIAtenTensorHandle(AtenTensorHandle given) : held(given) {}
    RAIIAtenTensorHandle(RAIIAtenTensorHandle&& other) noexcept : held(other.release()) {}
    RAIIAtenTensorHandle& operator=(RAIIAtenTensorHandle&& other) noexcept {
        AtenTensorHandle given = other.release();
        reset();
        held = given;
        return *this;
    }
    __attribute__((noinline)) ~RAIIAtenTensorHandle() { reset(); }

    operator AtenTensorHandle() const { return held; }
    AtenTensorHandle get() const { return held; }
    AtenTensorHandle release() {
        AtenTensorHandle given = held;
        held = nullptr;
        return given;
    }
    __attribute__((noinline)) void reset() noexcept {
        if (held) aoti_torch_delete_tensor_object(release());
    }
    __attribute__((noinline)) void* data_ptr() const {
        void* found = nullptr;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(held, &found));
        return found;
    }
    int64_t size(int64_t dim) const {
        int64_t found = 0;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(held, dim, &found));
        return found;
    }
    int64_t stride(int64_t dim) const {
        int64_t found = 0;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_stride(held, dim, &found));
        return found;
    }
    int64_t storage_offset() const {
        int64_t found = 0;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(held, &found));
        return found;
    }
    int64_t* sizes() const {
        int64_t* found = nullptr;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(held, &found));
        return found;
    }
    int64_t* strides() const {
        int64_t* found = nullptr;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(held, &found));
        return found;
    }
};

#define SIDEFX_TENSOR_OF(type, name) \
    __attribute__((unused)) static RAIIAtenTensorHandle scalar_to_tensor_handle(type value) { \
        AtenTensorHandle made = nullptr; \
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_scalar_to_tensor_##name(value, &made)); \
        return made; \
    }
SIDEFX_TENSOR_OF(float, float32) SIDEFX_TENSOR_OF(double, float64) SIDEFX_TENSOR_OF(int32_t, int32)
SIDEFX_TENSOR_OF(int64_t, int64) SIDEFX_TENSOR_OF(bool, bool)

// Takes ownership of the inputs.
class SidefxInputs {
    RAIIAtenTensorHandle* items;

public:
    SidefxInputs(AtenTensorHandle* handles, int64_t count) : items(new RAIIAtenTensorHandle[count]) {
        for (int64_t i = 0; i < count; ++i) {
            items[i] = RAIIAtenTensorHandle(handles[i]);
            handles[i] = nullptr;
        }
    }
    SidefxInputs(const SidefxInputs&) = delete;
    ~SidefxInputs() { delete[] items; }
    RAIIAtenTensorHandle& operator[](int64_t i) { return items[i]; }
};

static inline SidefxInputs steal_from_raw_handles_to_raii_handles(AtenTensorHandle* handles, int64_t count) {
    return SidefxInputs(handles, count);
}

static inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) { return handle; }

__attribute__((noinline)) static AtenTensorHandle reinterpret_tensor_wrapper(
    AtenTensorHandle base, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) {
    AtenTensorHandle view = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(base, dims, sizes, strides, offset, &view));
    return view;
}

template <class T>
static inline T& temporary_reference(T&& given) { return static_cast<T&>(given); }

namespace py {
struct gil_scoped_release_simple {
    void* state = PyEval_SaveThread();
    gil_scoped_release_simple() = default;
    gil_scoped_release_simple(const gil_scoped_release_simple&) = delete;
    ~gil_scoped_release_simple() { PyEval_RestoreThread(state); }
};
}  // namespace py
""".replace("@FAILURE@", FAILURE).replace("@INTEGER_DIVISION@", INTEGER_DIVISION.strip())


def header_free_wrapper(caller: str) -> str | None:
    """Returns a wrapper that needs only the header of torch's C types; ``None`` if it needs torch's own header.

    Args:
        caller: Inductor's wrapper, without the include of its header.
    """
    text = _NARROW.sub("void*", _DECLARATIONS.sub("", caller))
    if "#include" in text or any(found.group(0) not in _KNOWN for found in _BEYOND.finditer(text)):
        return None
    prototypes = _prototypes()
    names = {
        name for name in re.findall(r"\b(?:aoti_)?torch_\w+(?=\()", text) if not name.startswith(compat.KERNEL_FUNCTION)
    }
    for kind, macro in (
        ("dtype", "DTYPE"),
        ("device_type", "DEVICE"),
        ("layout", "LAYOUT"),
        ("memory_format", "MEMORY_FORMAT"),
    ):
        names |= {f"aoti_torch_{kind}_{name}" for name in re.findall(rf"\bCACHE_TORCH_{macro}\((\w+)\)", text)}
    names |= set(_NEEDED)
    if not names <= prototypes.keys():
        return None
    declared = "\n".join(prototypes[name] for name in sorted(names))
    if re.search(r"\b(c10|at|torch)::", declared):
        return None
    prelude = _PRELUDE.replace("@TYPES@", compat.C_TYPES_HEADER).replace("@DECLARED@", declared)
    return prelude + re.sub(r"\bstd::", "lean::", text)


@lru_cache(maxsize=1)
def _prototypes() -> dict[str, str]:
    """Returns the declarations of torch's C interface, by name."""
    found: dict[str, str] = {}
    for header in compat.c_interface():
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
        for declared in re.finditer(r"AOTI_TORCH_EXPORT\s+([\w\s*]*?\b((?:aoti_)?torch_\w+)\s*\([^();]*\));", text):
            found[declared[2]] = " ".join(declared[1].split()) + ";"
    return found
