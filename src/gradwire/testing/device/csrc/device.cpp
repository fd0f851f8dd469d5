// The module: registers the device with torch, and gives Python what `gradwire.testing.device` needs.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace testdev {
namespace {

REGISTER_ALLOCATOR(TYPE, &memory());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A Python function as one launch. It is released with the GIL, wherever its task ends.
void enqueue(py::function function, const Tensors& tensors, const std::string& name) {
  Tensors host;
  size_t bytes = 0;
  for (auto& tensor : tensors) {
    host.push_back(ours(tensor) ? on_host(tensor) : tensor);
    bytes += tensor.nbytes();
  }
  auto held = std::shared_ptr<py::function>(new py::function(std::move(function)), [](py::function* owned) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete owned;
  });
  py::gil_scoped_release released;
  device().launch(current_stream, name, bytes, [held, host] {
    py::gil_scoped_acquire gil;
    try {
      py::list arguments;
      for (auto& tensor : host) arguments.append(tensor);
      (*held)(*arguments);
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());  // its text can be read with the GIL only
    }
  });
}

Schedule schedule_of(const std::string& name) {
  static const std::map<std::string, Schedule> known{
      {"lazy", Schedule::Lazy}, {"eager_sides", Schedule::EagerSides}, {"lazy_sides", Schedule::LazySides},
      {"shuffled", Schedule::Shuffled}, {"eager", Schedule::Eager}};
  return known.at(name);
}

std::map<std::string, int64_t> counters() {
  auto& now = device().counters;
  return {{"host_syncs", now.host_syncs}, {"launches", now.launches}, {"collectives", now.collectives}, {"poisoned", now.poisoned}};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::SymIntArrayRef)>(view));
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
}

}  // namespace testdev

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace testdev;
  using released = py::call_guard<py::gil_scoped_release>;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(m, "Backend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, const std::string&>());
  m.def("set_schedule", [](const std::string& name, uint64_t seed) { device().set_schedule(schedule_of(name), seed); }, released());
  m.def("synchronize", [] { device().synchronize_all("synchronize"); }, released());
  m.def("counters", &counters);
  m.def("sync_reasons", [] { return device().sync_reasons(); });
  m.def("reset_counters", [] { device().reset_counters(); });
  m.def("enqueue", &enqueue);
  m.def("host_us", [] { return device().host_us(); });
  m.def("advance_host", [](double us) { device().advance_host(us); });
  m.def("set_costs", [](double launch_us, double bytes_per_us, double collective_us, double link_bytes_per_us) {
    device().costs = Costs{launch_us, bytes_per_us, collective_us, link_bytes_per_us};
  });
  m.def("set_capturing", [](bool capturing) { device().capturing = capturing; });
  m.def("is_capturing", [] { return device().capturing.load(); });
}
