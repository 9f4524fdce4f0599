// Right numbers under the CUDA dispatch key: for each aten operator that has a kernel for CUDA and one for the CPU, a
// boxed function makes CPU tensors over the arguments' memory, calls the CPU kernel, and gives new results memory of
// torch's CUDA allocator. Views and allocations keep their CUDA kernels. What mixes devices is refused, and what waits for
// the device is told to torch.cuda.set_sync_debug_mode, as CUDA does.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace {
using c10::IValue;
using Values = std::vector<IValue>;

std::map<std::string, long> calls;  // of operators by name, where counting is on
std::mutex calls_lock;
bool is_counting = false;
std::vector<std::string> computed, without_cpu_kernel;  // operators

// Allocations and what reads the device's own state.
const std::set<std::string> KEPT = {"empty", "empty_strided", "empty_like", "set_", "resize_", "resize_as_",
    "_resize_output_", "record_stream", "is_pinned", "_pin_memory", "pin_memory", "as_strided", "as_strided_",
    "_local_scalar_dense", "_efficientzerotensor", "is_set_to", "copy_", "_copy_from_and_resize", "_fused_sdp_choice",
    "storage", "_has_compatible_shallow_copy_type"};
// Indices of these may lie on the CPU.
const std::set<std::string> MIXED = {"aten::index", "aten::_index_put_impl_", "aten::index_put", "aten::index_put_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};

// The host waits for the device to know the size of these results, or the answer.
const std::set<std::string> WAITING = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::is_nonzero"};

bool on_device(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

at::Tensor host_view(const at::Tensor& t) {  // the same memory as a CPU tensor
  if (!on_device(t)) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "host kernels take strided tensors, not ", t.layout());
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU);
  bool is_empty = t.numel() == 0 && t.storage().nbytes() == 0;
  at::Tensor out = is_empty ? at::empty_strided(t.sizes(), t.strides(), options)
                            : at::for_blob(t.data_ptr(), t.sizes()).strides(t.strides()).options(options).make_tensor();
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor to_device(const at::Tensor& t, c10::Device device) {
  if (!t.defined() || t.is_cuda()) return t;
  at::Tensor out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  if (t.numel() == 0) return out;
  int64_t last = 0;  // strides may skip or overlap: all from the first to the last element is copied
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  std::memcpy(out.data_ptr(), t.data_ptr(), (last + 1) * t.element_size());
  return out;
}

at::Generator host_generator(const at::Generator& g) {  // its numbers follow the device's seed and offset
  auto offset = g.get_offset();
  const_cast<at::Generator&>(g).set_offset(offset + 4);
  return at::detail::createCPUGenerator(g.current_seed() * 1000003ull + offset);
}

template <class F>
void each_tensor(const IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) f(t);
  else if (v.isOptionalTensorList()) for (const auto& t : v.toOptionalTensorVector()) if (t) f(*t);
}

std::optional<c10::Device> device_of(const std::string& name, const Values& arguments) {
  std::optional<c10::Device> device;
  for (const auto& v : arguments) each_tensor(v, [&](const at::Tensor& t) { if (on_device(t) && !device) device = t.device(); });
  if (!device || MIXED.count(name)) return device;
  for (const auto& v : arguments) each_tensor(v, [&](const at::Tensor& t) {
    bool is_scalar = t.defined() && t.is_cpu() && t.dim() == 0;
    TORCH_CHECK(!t.defined() || t.device() == *device || is_scalar,
        "Expected all tensors to be on the same device, but ", name, " got one on ", t.device(), " beside ", *device);
  });
  return device;
}

bool waits(const std::string& name, const Values& arguments) {
  if (WAITING.count(name)) return true;
  bool is_by_mask = false;
  if (MIXED.count(name)) each_tensor(arguments[1], [&](const at::Tensor& t) {
    is_by_mask |= t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
  });
  return is_by_mask;
}

IValue host_argument(const IValue& v, std::optional<c10::Device>& device) {
  if (v.isTensor()) return host_view(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(host_view(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : v.toOptionalTensorVector())
      list.push_back(t ? std::optional<at::Tensor>(host_view(*t)) : std::nullopt);
    return list;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) {
    if (!device) device = v.toDevice();
    return c10::Device(at::kCPU);
  }
  if (v.isGenerator() && v.toGenerator().defined() && v.toGenerator().device().is_cuda())
    return host_generator(v.toGenerator());
  return v;
}

// The argument that an in-place or out= operator returns, if result `j` is one.
std::optional<IValue> written_argument(const c10::FunctionSchema& schema, size_t j, const Values& arguments) {
  const auto* wanted = schema.returns()[j].alias_info();
  if (!wanted || !wanted->isWrite()) return std::nullopt;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* found = schema.arguments()[i].alias_info();
    if (found && found->beforeSets() == wanted->beforeSets()) return arguments[i];
  }
  return std::nullopt;
}

IValue device_result(const IValue& v, c10::Device device) {
  if (v.isTensor()) return to_device(v.toTensor(), device);
  if (!v.isTensorList()) return v;
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : v.toTensorVector()) list.push_back(to_device(t, device));
  return list;
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), num_results = schema.returns().size();
  if (is_counting) {
    std::lock_guard<std::mutex> hold(calls_lock);
    calls[toString(op.operator_name())]++;
  }
  Values arguments(stack->end() - n, stack->end());
  torch::jit::drop(*stack, n);
  auto device = device_of(op.operator_name().name, arguments);
  if (device && waits(op.operator_name().name, arguments)) c10::cuda::warn_or_error_on_sync();
  std::map<size_t, at::Tensor> grown;  // empty out= tensors, which the kernel resizes
  for (size_t i = 0; i < n; i++) {
    const IValue& v = arguments[i];
    if (schema.arguments()[i].is_out() && v.isTensor() && on_device(v.toTensor()) && v.toTensor().numel() == 0) {
      grown[i] = at::empty({0}, v.toTensor().options().device(at::kCPU));
      torch::jit::push(*stack, grown[i]);
    } else {
      torch::jit::push(*stack, host_argument(v, device));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  Values results(stack->end() - num_results, stack->end());
  torch::jit::drop(*stack, num_results);
  for (auto& [i, t] : grown) {
    at::Tensor out = arguments[i].toTensor();
    if (t.sizes() != out.sizes()) out.resize_(t.sizes());
    if (t.numel()) std::memcpy(out.data_ptr(), t.contiguous().data_ptr(), t.nbytes());
  }
  for (size_t j = 0; j < num_results; j++) {
    auto written = written_argument(schema, j, arguments);
    torch::jit::push(*stack, written ? *written : device_result(results[j], device.value_or(c10::Device(at::kCUDA, 0))));
  }
}

void copy(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {  // between devices of any kind
  at::Tensor to = stack->end()[-3].toTensor(), from = stack->end()[-2].toTensor();
  if (on_device(to) != on_device(from) && !stack->end()[-1].toBool()) c10::cuda::warn_or_error_on_sync();
  torch::jit::drop(*stack, 3);
  {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView below;
    host_view(to).copy_(host_view(from));
  }
  torch::jit::push(*stack, to);
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& r : schema.returns())
    if (r.alias_info() && !r.alias_info()->isWrite()) return true;
  return false;
}

size_t install() {  // once a process
  static torch::Library* library = nullptr;
  if (library) return computed.size();
  library = new torch::Library(torch::Library::IMPL, "aten", c10::make_optional(c10::DispatchKey::CUDA), __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    std::string base = name.name.substr(6);
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || KEPT.count(base) || returns_view(op->schema())) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      without_cpu_kernel.push_back(toString(name));
      continue;
    }
    std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
    computed.push_back(full);
  }
  library->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  return computed.size();
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("without_cpu_kernel", [] { return without_cpu_kernel; });
  m.def("count", [](bool on) { is_counting = on; });
  m.def("counts", [] { return calls; });
  m.def("host_view", &host_view, "the same memory as a CPU tensor");
  m.def("to_device", [](const at::Tensor& t, int64_t index) {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    return to_device(t, c10::Device(at::kCUDA, index));
  });
}
