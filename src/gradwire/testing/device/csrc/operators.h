// Operators: shapes come from torch's Meta kernels at once, values come from its CPU kernels when the stream runs.
//
// One fallback serves nearly all operators. What has a result that depends on values (nonzero, item, equal) first
// synchronises, as on a GPU. Random numbers are drawn when the operator is called, so that no schedule changes them.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "guard.h"

namespace testdev {

using Stack = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// Tasks run in any thread: they must not see the modes that happen to be active there.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard without{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
  c10::InferenceMode normal{false};
};

inline bool ours(const at::Tensor& tensor) { return tensor.device().type() == TYPE; }

// The same memory as a CPU tensor. It keeps nothing alive, as a kernel does not.
inline at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  auto host = at::for_blob(tensor.mutable_data_ptr(), tensor.sizes()).strides(tensor.strides()).options(options).make_tensor();
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

inline at::Tensor new_like(const at::Tensor& meta) {
  return at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type());
}

inline at::Tensor shape_of(const at::Tensor& tensor) {
  if (!ours(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

inline c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value.toTensor();
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (at::Tensor tensor : value.toTensorList()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

inline Stack map_tensors(const Stack& values, const Change& change, c10::Device device) {
  Stack changed;
  for (auto& value : values) changed.push_back(value.isDevice() ? c10::IValue(device) : map_tensors(value, change));
  return changed;
}

inline size_t bytes_of(const Stack& values) {
  size_t bytes = 0;
  auto count = [&](const at::Tensor& tensor) { return bytes += tensor.nbytes(), tensor; };
  for (auto& value : values) map_tensors(value, count);
  return bytes;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op), schema_(op.schema()), args_(stack.end() - schema_.arguments().size(), stack.end()) {}

  Stack run() {
    host_ = map_tensors(args_, [](const at::Tensor& tensor) { return ours(tensor) ? on_host(tensor) : tensor.detach().clone(); }, at::kCPU);
    if (draws()) return draw();
    return infer() ? enqueue() : compute_now();
  }

 private:
  const std::string& name() const { return schema_.name(); }

  static bool is_tensors(const c10::TypePtr& type) {
    if (auto optional = type->cast<c10::OptionalType>()) return is_tensors(optional->getElementType());
    if (auto list = type->cast<c10::ListType>()) return is_tensors(list->getElementType());
    return type->isSubtypeOf(*c10::TensorType::get());
  }

  static bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

  // The argument of which a result is the same tensor, or a view; -1 if the result is new.
  int64_t source_of(const c10::Argument& result) const {
    if (!result.alias_info()) return -1;
    for (size_t i = 0; i < args_.size(); i++) {
      auto alias = schema_.arguments()[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int64_t>(i);
    }
    return -1;
  }

  bool needs_shapes() const {
    for (auto& argument : schema_.arguments())
      if (argument.is_out()) return true;
    for (auto& result : schema_.returns())
      if (source_of(result) < 0 || !writes(result)) return true;
    return false;
  }

  // The shapes of the results; false if they depend on values.
  bool infer() {
    for (auto& result : schema_.returns())
      if (!is_tensors(result.type())) return false;
    if (!needs_shapes()) return true;
    auto args = map_tensors(args_, shape_of, at::kMeta);
    meta_ = args;
    try {
      op_.callBoxed(&meta_);
    } catch (const std::exception&) {
      return false;
    }
    for (size_t i = 0; i < args.size(); i++)
      if (schema_.arguments()[i].is_out() && args[i].isTensor()) fit(i, args[i].toTensor());
    return true;
  }

  void fit(size_t i, const at::Tensor& meta) {
    auto out = args_[i].toTensor();
    if (out.sizes() == meta.sizes()) return;
    out.resize_(meta.sizes());
    host_[i] = on_host(out);
  }

  Stack enqueue() {
    Stack results;
    std::vector<at::Tensor> fresh;
    std::vector<bool> is_fresh;
    for (size_t k = 0; k < schema_.returns().size(); k++) {
      const auto source = source_of(schema_.returns()[k]);
      is_fresh.push_back(source < 0);
      if (source >= 0)
        results.push_back(writes(schema_.returns()[k]) ? args_[source] : view(args_[source].toTensor(), meta_[k].toTensor()));
      else
        results.push_back(map_tensors(meta_[k], [&](const at::Tensor& meta) { return fresh.push_back(new_like(meta)), fresh.back(); }));
    }
    if (fresh.empty() && !changes_anything()) return results;  // a view
    std::vector<at::Tensor> to;
    auto bytes = bytes_of(host_);
    for (auto& tensor : fresh) {
      to.push_back(on_host(tensor));
      bytes += tensor.nbytes();
    }
    device().launch(current_stream, name(), bytes, [op = op_, host = host_, to, is_fresh]() mutable {
      Plain plain;
      op.callBoxed(&host);
      size_t next = 0;
      for (size_t k = 0; k < is_fresh.size(); k++)
        if (is_fresh[k]) map_tensors(host[k], [&](const at::Tensor& made) { return to[next++].copy_(made); });
    });
    return results;
  }

  bool changes_anything() const {
    return std::any_of(schema_.arguments().begin(), schema_.arguments().end(), [](auto& argument) { return writes(argument); });
  }

  static at::Tensor view(const at::Tensor& base, const at::Tensor& meta) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), meta.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(
        base.storage_offset() * static_cast<int64_t>(base.itemsize()) / static_cast<int64_t>(meta.itemsize()) + meta.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    return made;
  }

  Stack compute_now() {
    device().synchronize(current_stream, name());
    op_.callBoxed(&host_);
    Stack results;
    for (size_t k = 0; k < host_.size(); k++) {
      const auto source = source_of(schema_.returns()[k]);
      results.push_back(source >= 0 ? args_[source] : map_tensors(host_[k], to_device));
    }
    return results;
  }

  static at::Tensor to_device(const at::Tensor& host) {
    auto made = new_like(host);
    on_host(made).copy_(host);
    return made;
  }

  // -- random numbers --------------------------------------------------------------------------------------------

  // Whether this fills tensors from a generator, and reads none.
  bool draws() const {
    bool has_generator = false, reads = false;
    for (size_t i = 0; i < args_.size(); i++) {
      auto& argument = schema_.arguments()[i];
      has_generator |= argument.name() == "generator";
      reads |= is_tensors(argument.type()) && !writes(argument);
    }
    return has_generator && !reads && changes_anything();
  }

  Stack draw() {
    auto fresh = [](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
    };
    auto drawn = map_tensors(args_, fresh, at::kCPU), results = drawn;
    op_.callBoxed(&results);
    for (size_t i = 0; i < args_.size(); i++) {
      if (!args_[i].isTensor()) continue;
      auto to = args_[i].toTensor(), from = drawn[i].toTensor();
      if (to.sizes() != from.sizes()) to.resize_(from.sizes());
      device().launch(current_stream, name(), to.nbytes(), [to = on_host(to), from]() mutable {
        Plain plain;
        to.copy_(from);
      });
    }
    Stack same;
    for (auto& result : schema_.returns()) same.push_back(args_[source_of(result)]);
    return same;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack args_, host_, meta_;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Plain plain;
  auto results = Call(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// -- operators of their own --------------------------------------------------------------------------------------------

inline at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

inline at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

inline at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, std::nullopt);
}

inline at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

// To the device: what the host holds now. To the host: without `non_blocking` it synchronises; with it, the host must.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Plain plain;
  if (!ours(to) && !non_blocking) {
    device().synchronize(current_stream, "copy to the host");
    to.copy_(on_host(from));
    return to;
  }
  auto target = ours(to) ? on_host(to) : to.detach(), source = ours(from) ? on_host(from) : from.detach().clone();
  device().launch(current_stream, "copy", from.nbytes() + to.nbytes(), [target, source]() mutable {
    Plain plain;
    target.copy_(source);
  });
  return to;
}

inline at::Scalar item(const at::Tensor& tensor) {
  device().synchronize(current_stream, "item");
  Plain plain;
  return on_host(tensor).item();
}

inline const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto needed = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

inline at::Tensor& set_source(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  else
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  return tensor;
}

inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_source(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto values = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_source(tensor, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(values)}), c10::SymIntArrayRef({c10::SymInt(1)}));
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  memory().record_use(tensor.storage().mutable_data(), stream.id());
}

}  // namespace testdev
