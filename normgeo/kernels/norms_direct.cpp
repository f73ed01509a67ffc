// The norms for Python to call with its tensors, without torch's dispatcher: between matrix products, which push the code
// of that way out of the caches, it takes longer than a norm; and on a GPU any way through Python takes longer than torch's
// own norms. What the dispatcher would not take to the device's kernel as it is, what does not suit a kernel, and what no
// kernel of Triton's was kept for, gives None. Modes that override torch's functions in Python do not see the calls.

#include <torch/csrc/python_headers.h>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/stable/ops.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "launches.h"

namespace normgeo {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int64_t LONG = 1 << 18;  // numbers from which on other threads of Python may run meanwhile

// Keys that lead to a device's kernel when no gradients are wanted; others trace, transform or watch, or it lies elsewhere.
constexpr DispatchKeySet PLAIN =
    DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::CUDA, DispatchKey::AutogradCUDA,
                    DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect}) | c10::autocast_dispatch_keyset;

Launches launches;
c10::DeviceType launched = c10::DeviceType::CUDA;  // what kernels are launched on; a test has no such device

class Caller {
public:
    Caller() : now(c10::impl::tls_local_dispatch_key_set()) {}

    // The tensor of a Python object; null where it is none, not a plain one, or on another device than the first.
    const Tensor* plain(PyObject* given) {
        if (!THPVariable_CheckExact(given)) return nullptr;
        const Tensor& x = THPVariable_Unpack(given);
        if (!PLAIN.has_all(x.key_set() | now.included_) || x._fw_grad(0).defined()) return nullptr;
        if (!device) device = x.device();
        return x.device() == *device ? &x : nullptr;
    }

    // A tensor in a dtype of the kernels, with d numbers along its last dimension.
    const Tensor* hidden_states(PyObject* given, int* type) {
        const Tensor* x = plain(given);
        return x && x->dim() && type_of(*x, type) ? x : nullptr;
    }

    // Whether what is given is where kernels are launched.
    bool launches_here() const { return device->type() == launched; }

    // The build that suits, if any: where another device is the current one none does.
    std::optional<Build> build(const Call& call, const Types& types, bool adds) const {
        auto found = launches.find(call, types, adds, index());
        return found && c10::impl::VirtualGuardImpl(launched).getDevice() == *device ? found : std::nullopt;
    }

    int index() const { return device->has_index() ? device->index() : 0; }

    // gamma, beta and their dtype; false where they suit no kernel.
    bool parameters(PyObject* weight, PyObject* bias, int64_t d, int stream, Affine* affine, int* type) {
        const void** places[] = {&affine->weight, &affine->bias};
        PyObject* both[] = {weight, bias};
        int found = -1;
        for (int i = 0, one; i < 2; i++) {
            *places[i] = nullptr;
            if (both[i] == Py_None) continue;
            const Tensor* p = plain(both[i]);
            if (!p || !type_of(*p, &one) || p->dim() != 1 || p->numel() != d || !p->is_contiguous()) return false;
            if (found >= 0 && one != found) return false;
            found = one;
            *places[i] = p->const_data_ptr();
        }
        *type = found < 0 ? stream : found;
        return *type == stream || *type == FLOAT;
    }

    static bool type_of(const Tensor& x, int* type) {
        switch (x.scalar_type()) {
            case at::kFloat: *type = FLOAT; return true;
            case at::kBFloat16: *type = BFLOAT; return true;
            case at::kHalf: *type = HALF; return true;
            default: return false;
        }
    }

private:
    const c10::impl::LocalDispatchKeySet now;
    std::optional<c10::Device> device;
};

// eps, offset and kind as Python has them; an error is left to be raised.
struct Numbers {
    float eps, offset;
    int kind;
    explicit Numbers(PyObject* const* given)
        : eps(float(PyFloat_AsDouble(given[0]))), offset(float(PyFloat_AsDouble(given[1]))),
          kind(int(PyLong_AsLong(given[2]))) {}
};

template <bool ADD>
void without_the_lock(const Call& call, const Types& types) {
    const auto loop = [](auto... given) { torch::stable::parallel_for(given...); };
    if (call.rows * call.d < LONG) return run<ADD>(call, types, loop);
    pybind11::gil_scoped_release others;
    run<ADD>(call, types, loop);
}

bool launch(const Build& build, const Call& call, int device) {
    pybind11::gil_scoped_release others;  // the driver waits where too many launches are under way
    return launches(build, call, device);
}

Tensor made_like(const Tensor& x) {
    return x.is_cpu() ? at::detail::empty_cpu(x.sizes(), x.scalar_type()) : at::empty(x.sizes(), x.options());
}

// norm(x, weight, bias, eps, offset, kind)
PyObject* norm(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 6, "norm takes 6 arguments, not ", count);
    const Numbers numbers(given + 3);
    if (PyErr_Occurred()) return nullptr;
    Caller caller;
    Types types;
    Affine affine;
    const Tensor* x = at::GradMode::is_enabled() ? nullptr : caller.hidden_states(given[0], &types.stream);
    if (!x || !caller.parameters(given[1], given[2], x->size(-1), types.stream, &affine, &types.parameters)) Py_RETURN_NONE;
    types.added = types.made = types.stream;
    affine.offset = numbers.offset;
    const int64_t d = x->size(-1), rows = d ? x->numel() / d : 0;
    Call call{nullptr, nullptr, nullptr, rows, d, affine, numbers.eps, numbers.kind};
    // which is only read where nothing is added; what has yet to be gathered begins where it should
    if (x->is_contiguous()) call.residual = const_cast<void*>(x->const_data_ptr());
    const auto build = caller.launches_here() ? caller.build(call, types, false) : std::nullopt;
    if (caller.launches_here() && !build) Py_RETURN_NONE;
    RECORD_FUNCTION("normgeo::norm", {});
    Tensor contiguous;
    if (!x->is_contiguous()) {
        x = &(contiguous = x->contiguous());
        call.residual = const_cast<void*>(x->const_data_ptr());
    }
    Tensor out = made_like(*x);
    call.out = out.data_ptr();
    if (!build) without_the_lock<false>(call, types);
    else if (!launch(*build, call, caller.index())) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(out));
    END_HANDLE_TH_ERRORS
}

// add_norm_(residual, x, weight, bias, eps, offset, kind, over)
PyObject* add_norm_(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 8, "add_norm_ takes 8 arguments, not ", count);
    const Numbers numbers(given + 4);
    const int over = PyObject_IsTrue(given[7]);
    if (PyErr_Occurred()) return nullptr;
    Caller caller;
    Types types;
    Affine affine;
    const Tensor* residual = at::GradMode::is_enabled() ? nullptr : caller.hidden_states(given[0], &types.stream);
    const Tensor* x = residual ? caller.hidden_states(given[1], &types.added) : nullptr;
    if (!x || !residual->is_contiguous() || x->sizes() != residual->sizes()) Py_RETURN_NONE;
    // as under autocast the stream may be wider than what is added to it, but not narrower
    if (types.added != types.stream && types.stream != FLOAT) Py_RETURN_NONE;
    const bool kept = !c10::InferenceMode::is_enabled();  // tensors of that mode may not be written over
    if (kept && ((over && x->is_inference()) || (residual->is_inference() && caller.launches_here()))) Py_RETURN_NONE;
    const int64_t d = x->size(-1), rows = d ? x->numel() / d : 0;
    if (!caller.parameters(given[2], given[3], d, types.stream, &affine, &types.parameters)) Py_RETURN_NONE;
    types.made = over ? types.added : types.stream;
    affine.offset = numbers.offset;
    Call call{residual->data_ptr(), nullptr, nullptr, rows, d, affine, numbers.eps, numbers.kind};
    if (x->is_contiguous()) call.x = x->const_data_ptr();
    const auto build = caller.launches_here() ? caller.build(call, types, true) : std::nullopt;
    if (caller.launches_here() && !build) Py_RETURN_NONE;
    RECORD_FUNCTION("normgeo::add_norm_", {});
    Tensor contiguous, made;  // where the norm goes, unless it is written over x
    if (!x->is_contiguous()) call.x = (x = &(contiguous = x->contiguous()))->const_data_ptr();
    if (!over) made = made_like(*residual);
    else if (contiguous.defined()) made = contiguous;
    call.out = (made.defined() ? made : *x).data_ptr();
    if (build && !launch(*build, call, caller.index())) Py_RETURN_NONE;
    residual->unsafeGetTensorImpl()->bump_version();  // which fails, before anything is written, where it may not be
    if (!made.defined()) x->unsafeGetTensorImpl()->bump_version();
    if (!build) without_the_lock<true>(call, types);
    return made.defined() ? THPVariable_Wrap(std::move(made)) : Py_NewRef(given[1]);
    END_HANDLE_TH_ERRORS
}

// begin(launch, stream, device): how kernels are launched on devices of this type; those kept before are forgotten
PyObject* begin(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "begin takes 3 arguments, not ", count);
    void *launch = PyLong_AsVoidPtr(given[0]), *stream = PyLong_AsVoidPtr(given[1]);
    const char* device = PyUnicode_AsUTF8(given[2]);
    if (PyErr_Occurred()) return nullptr;
    launches.clear();
    launches.launch = reinterpret_cast<LaunchKernel>(launch);
    launches.stream = reinterpret_cast<CurrentStream>(stream);
    launched = c10::Device(device).type();
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// keep(residual, x, weight, bias, out, eps, offset, kind, kernel, threads, shared, rows, arguments)
PyObject* keep(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 13, "keep takes 13 arguments, not ", count);
    const Numbers numbers(given + 5);
    char* order;
    Py_ssize_t arguments;
    if (PyBytes_AsStringAndSize(given[12], &order, &arguments)) return nullptr;
    Build build{PyLong_AsVoidPtr(given[8]), unsigned(PyLong_AsLong(given[9])), unsigned(PyLong_AsLong(given[10])),
                PyLong_AsLong(given[11]), int(arguments), {}};
    if (PyErr_Occurred()) return nullptr;
    bool known = build.rows > 0 && arguments <= ARGUMENTS;
    for (int i = 0; known && i < build.count; i++) {
        build.arguments[i] = Argument(order[i]);
        known = order[i] >= 0 && order[i] < ARGUMENTS;
    }
    TORCH_CHECK_VALUE(known, "no kernel of the norms takes these arguments");
    Caller caller;
    Types types;
    Affine affine;
    const Tensor* residual = caller.hidden_states(given[0], &types.stream);
    const bool adds = given[1] != Py_None;
    const Tensor* x = residual && adds ? caller.hidden_states(given[1], &types.added) : residual;
    if (!x || !caller.launches_here() || !caller.hidden_states(given[4], &types.made)) Py_RETURN_FALSE;
    if (!adds) types.added = types.stream;
    const int64_t d = residual->size(-1);
    if (!caller.parameters(given[2], given[3], d, types.stream, &affine, &types.parameters)) Py_RETURN_FALSE;
    affine.offset = numbers.offset;
    const Call call{nullptr, nullptr, nullptr, 0, d, affine, numbers.eps, numbers.kind};
    launches.keep(call, types, adds, caller.index(), build);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

template <class F>
PyMethodDef method(const char* name, F function, const char* text) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, text};
}

PyMethodDef methods[] = {
    method("norm", norm, "norm(x, weight, bias, eps, offset, kind)"),
    method("add_norm_", add_norm_, "add_norm_(residual, x, weight, bias, eps, offset, kind, over)"),
    method("begin", begin, "begin(launch, stream, device)"),
    method("keep", keep, "keep(residual, x, weight, bias, out, eps, offset, kind, kernel, threads, shared, rows, arguments)"),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "norms_direct", nullptr, -1, methods};

}  // namespace normgeo

PyMODINIT_FUNC PyInit_norms_direct() { return PyModule_Create(&normgeo::definition); }
