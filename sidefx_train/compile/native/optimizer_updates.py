"""C++ of the native module: optimizer updates over many tensors in one call, and index checks.

Tensors are accessed through the function by which torch passes data pointers to generated code. The arithmetic follows
torch's fused CPU kernels operation by operation.
"""

SOURCE = r"""
// A short array, instead of std::vector, whose header takes long to read.
template <class T> class Row {
    T* items;
    size_t count;

public:
    explicit Row(size_t n) : items(new T[n ? n : 1]()), count(n) {}
    Row(Row&& other) noexcept : items(other.items), count(other.count) { other.items = nullptr; }
    ~Row() { delete[] items; }
    T& operator[](size_t i) { return items[i]; }
    const T& operator[](size_t i) const { return items[i]; }
    size_t size() const { return count; }
    bool empty() const { return count == 0; }
    const T* begin() const { return items; }
    const T* end() const { return items + count; }
};

static void* (*data_ptr)(PyObject*);
static const int64_t GRAIN = 16384;      // elements per unit of work
static const int64_t SERIAL = 65536;     // below this, one thread

struct Span { int64_t tensor, start, end; };

// Divides tensors of the given sizes into units of at most GRAIN elements.
static Row<Span> spans(const Row<int64_t>& sizes, int64_t& total) {
    size_t count = 0;
    for (int64_t size : sizes) count += (size + GRAIN - 1) / GRAIN;
    Row<Span> out(count);
    total = 0;
    for (size_t i = 0, k = 0; i < sizes.size(); ++i) {
        total += sizes[i];
        for (int64_t s = 0; s < sizes[i]; s += GRAIN)
            out[k++] = {(int64_t)i, s, s + GRAIN < sizes[i] ? s + GRAIN : sizes[i]};
    }
    return out;
}

// Calls `run` with every unit of work, on several threads if there are enough elements.
template <class Run> static void on_spans(const Row<int64_t>& sizes, int threads, const Run& run) {
    int64_t total;
    auto work = spans(sizes, total);
    const int64_t units = (int64_t)work.size();
    if (total < SERIAL || threads < 2) {
        for (const auto& s : work) run(s);
    } else {
        Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t k = 0; k < units; ++k) run(work[k]);
        Py_END_ALLOW_THREADS
    }
}

static Row<float*> pointers(PyObject* tuple) {
    const Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    Row<float*> out(n);
    for (Py_ssize_t i = 0; i < n; ++i) out[i] = static_cast<float*>(data_ptr(PyTuple_GET_ITEM(tuple, i)));
    return out;
}

static Row<int64_t> integers(PyObject* tuple) {
    const Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    Row<int64_t> out(n);
    for (Py_ssize_t i = 0; i < n; ++i) out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return out;
}

struct AdamNumbers { float decay, weight_decay, lerp, beta2, rest2, eps, step_size, root; };

template <bool decoupled, bool amsgrad>
static void adam_span(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
                      float* __restrict vmax, int64_t n, AdamNumbers c, float sign) {
    const bool near = __builtin_fabsf(c.lerp) < 0.5f;
    const float coefficient = near ? c.lerp : c.lerp - 1.0f;
    for (int64_t i = 0; i < n; ++i) {
        float grad = sign * g[i], param = p[i];
        if (decoupled) param = param * c.decay; else grad = grad + param * c.weight_decay;
        const float base = near ? m[i] : grad;
        const float avg = __builtin_fmaf(coefficient, grad - m[i], base);
        const float square = v[i] * c.beta2 + c.rest2 * grad * grad;
        m[i] = avg;
        v[i] = square;
        float largest = square;
        if (amsgrad) { largest = vmax[i] > square ? vmax[i] : square; vmax[i] = largest; }
        const float denominator = __builtin_sqrtf(largest) / c.root + c.eps;
        p[i] = param - c.step_size * avg / denominator;
    }
}

// adam(sizes, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, increment, decoupled, amsgrad, maximize,
//      lr, beta1, beta2, weight_decay, eps, threads)
static PyObject* adam(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 17) { PyErr_SetString(PyExc_TypeError, "adam takes 17 arguments"); return nullptr; }
    auto sizes = integers(a[0]);
    auto p = pointers(a[1]), g = pointers(a[2]), m = pointers(a[3]), v = pointers(a[4]), vmax = pointers(a[5]);
    auto steps = pointers(a[6]);
    const double increment = PyFloat_AsDouble(a[7]);
    const bool decoupled = PyObject_IsTrue(a[8]), amsgrad = PyObject_IsTrue(a[9]);
    const float sign = PyObject_IsTrue(a[10]) ? -1.0f : 1.0f;
    const double lr = PyFloat_AsDouble(a[11]), beta1 = PyFloat_AsDouble(a[12]), beta2 = PyFloat_AsDouble(a[13]);
    const double weight_decay = PyFloat_AsDouble(a[14]), eps = PyFloat_AsDouble(a[15]);
    const int threads = (int)PyLong_AsLong(a[16]);
    if (PyErr_Occurred()) return nullptr;
    Row<AdamNumbers> numbers(sizes.size());
    double last = -1.0, size1 = 0.0, root = 0.0;
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (increment != 0.0) *steps[i] = (float)(*steps[i] + increment);
        const double step = *steps[i];
        if (step != last) {
            last = step;
            size1 = lr / (1 - __builtin_pow(beta1, step));
            root = __builtin_sqrt(1 - __builtin_pow(beta2, step));
        }
        numbers[i] = {(float)(1 - lr * weight_decay), (float)weight_decay, (float)(1 - beta1), (float)beta2,
                      (float)(1 - beta2), (float)eps, (float)size1, (float)root};
    }
    auto run = [&](const Span& s) {
        const int64_t i = s.tensor, n = s.end - s.start;
        float* top = amsgrad ? vmax[i] + s.start : nullptr;
#define SPAN(D, A) \
        adam_span<D, A>(p[i] + s.start, g[i] + s.start, m[i] + s.start, v[i] + s.start, top, n, numbers[i], sign)
        if (decoupled) { if (amsgrad) SPAN(true, true); else SPAN(true, false); }
        else { if (amsgrad) SPAN(false, true); else SPAN(false, false); }
#undef SPAN
    };
    on_spans(sizes, threads, run);
    Py_RETURN_NONE;
}

// sgd(sizes, params, grads, buffers, nesterov, maximize, first, lr, momentum, weight_decay, dampening, threads)
static PyObject* sgd(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 12) { PyErr_SetString(PyExc_TypeError, "sgd takes 12 arguments"); return nullptr; }
    auto sizes = integers(a[0]);
    auto p = pointers(a[1]), g = pointers(a[2]), b = pointers(a[3]);
    const bool nesterov = PyObject_IsTrue(a[4]), first = PyObject_IsTrue(a[6]), has_buffer = !b.empty();
    const float sign = PyObject_IsTrue(a[5]) ? -1.0f : 1.0f;
    const float lr = (float)PyFloat_AsDouble(a[7]), momentum = (float)PyFloat_AsDouble(a[8]);
    const float weight_decay = (float)PyFloat_AsDouble(a[9]), rest = (float)(1 - PyFloat_AsDouble(a[10]));
    const int threads = (int)PyLong_AsLong(a[11]);
    if (PyErr_Occurred()) return nullptr;
    auto run = [&](const Span& s) {
        float* __restrict param = p[s.tensor];
        const float* __restrict grads = g[s.tensor];
        float* __restrict buffer = has_buffer ? b[s.tensor] : nullptr;
        for (int64_t i = s.start; i < s.end; ++i) {
            float grad = sign * grads[i];
            if (weight_decay != 0.0f) grad = grad + weight_decay * param[i];
            if (has_buffer) {
                const float next = first ? grad : buffer[i] * momentum + grad * rest;
                buffer[i] = next;
                grad = nesterov ? grad + next * momentum : next;
            }
            param[i] = param[i] - lr * grad;
        }
    };
    on_spans(sizes, threads, run);
    Py_RETURN_NONE;
}

// bad_index(tensor, numel, low, high, ignore) -> True if a value of a contiguous int64 tensor is neither in [low, high)
// nor equal to ignore
static PyObject* bad_index(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 5) { PyErr_SetString(PyExc_TypeError, "bad_index takes 5 arguments"); return nullptr; }
    const int64_t* x = static_cast<const int64_t*>(data_ptr(a[0]));
    const int64_t n = PyLong_AsLongLong(a[1]), low = PyLong_AsLongLong(a[2]), high = PyLong_AsLongLong(a[3]);
    const int64_t ignore = PyLong_AsLongLong(a[4]);
    const uint64_t range = (uint64_t)(high - low);
    int64_t bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= ((uint64_t)(x[i] - low) >= range) & (x[i] != ignore);
    return PyBool_FromLong(bad);
}

// data_ptr_function(address): called once, with the address of torch's `void* (PyObject*)`
static PyObject* data_ptr_function(PyObject*, PyObject* address) {
    data_ptr = reinterpret_cast<void* (*)(PyObject*)>(PyLong_AsVoidPtr(address));
    Py_RETURN_NONE;
}
"""
