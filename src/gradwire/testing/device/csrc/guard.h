// What torch asks of a device: its current stream, events, storage that grows, random generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace testdev {

inline c10::Stream stream_of(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, here(), id); }

// An event is a pointer to the mark that it recorded last.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(DEFAULT_STREAM); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(device().new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(device().new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return device().is_idle(stream.id()); }
  bool isStreamCapturing(const c10::Stream&) const override { return device().capturing; }
  void synchronizeStream(const c10::Stream& stream) const override {
    device().synchronize(stream.id(), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { device().synchronize_all("synchronize"); }

  static MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark_of(*event) = device().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) device().wait(stream.id(), mark_of(event));
  }
  bool queryEvent(void* event) const override { return !event || mark_of(event)->done; }
  void synchronizeEvent(void* event) const override {
    if (event) device().synchronize(mark_of(event), "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "testdev: both events must be recorded before their elapsed time is read");
    TORCH_CHECK(
        mark_of(first)->done && mark_of(second)->done,
        "testdev: both events must be completed before their elapsed time is read");
    return static_cast<double>(mark_of(second)->time - mark_of(first)->time) / 1e6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().record_use(data.get(), stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().holds(data); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = memory().allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept) memory().copy_data(grown.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

}  // namespace testdev
