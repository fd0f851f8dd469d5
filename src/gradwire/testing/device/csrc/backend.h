// testccl: collectives on a stream of their own, over gloo, with NCCL's rules.
//
// A collective first waits for the stream on which it was called, then runs on the group's stream. `Work.wait()` makes
// the current stream wait for it, not the host. Until then, or until it has run, the tensors are kept alive.
//
// Refused when called, as NCCL refuses them: tensors that are empty, not contiguous, of different types, of types that
// NCCL does not have, or not on this device. Found when it runs, where NCCL would hang or mix up data: before each
// collective all ranks exchange what they are about to do. If the ranks do not call the same collectives of the same
// sizes in the same order, also over several groups, all of them raise an error that says who called what.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operators.h"

namespace testdev {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

enum class Kind : int64_t { AllReduce, Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, Gather, Scatter, Barrier };

inline const char* name_of(Kind kind) {
  static const char* names[] = {
      "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"};
  return names[static_cast<size_t>(kind)];
}

// -- what a rank is about to do, as numbers that all ranks can compare ---------------------------------------------------

struct Claim {
  static constexpr size_t FIXED = 8, GROUPS = 28, LENGTH = FIXED + 2 * GROUPS;
  Kind kind;
  at::ScalarType dtype;
  int64_t sent, received, detail, number;
  Time start = 0;
  std::map<int64_t, int64_t> others;  // how many collectives of each other group this process had called before

  at::Tensor pack() const {
    auto packed = at::zeros({static_cast<int64_t>(LENGTH)}, at::kLong);
    auto to = packed.mutable_data_ptr<int64_t>();
    int64_t fixed[] = {static_cast<int64_t>(kind), static_cast<int64_t>(dtype), sent, received, detail, number,
                       start, static_cast<int64_t>(std::min(others.size(), GROUPS))};
    std::copy(std::begin(fixed), std::end(fixed), to);
    size_t at = FIXED;
    for (auto& [group, count] : others) {
      if (at == LENGTH) break;
      to[at++] = group;
      to[at++] = count;
    }
    return packed;
  }

  static Claim unpack(const int64_t* from) {
    Claim claim{static_cast<Kind>(from[0]), static_cast<at::ScalarType>(from[1]), from[2], from[3], from[4], from[5],
                from[6], {}};
    for (int64_t k = 0; k < from[7]; k++) claim.others[from[FIXED + 2 * k]] = from[FIXED + 2 * k + 1];
    return claim;
  }

  bool same_call(const Claim& other) const {
    return kind == other.kind && dtype == other.dtype && sent == other.sent && received == other.received &&
        detail == other.detail && number == other.number;
  }

  bool same_order(const Claim& other) const {
    for (auto& [group, count] : others) {
      auto theirs = other.others.find(group);
      if (theirs != other.others.end() && theirs->second != count) return false;
    }
    return true;
  }

  std::string text() const {
    return c10::str(name_of(kind), " of ", sent, " ", c10::toString(dtype), " values");
  }
};

// The groups of this process, and how many collectives each has been given. After `destroy_process_group` torch uses
// names again, while garbage may still own groups of an earlier world: these do not count any longer.
class Groups {
 public:
  void add(int64_t group, const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    called_[group] = 0;
    owners_[group] = owner;
  }
  void remove(int64_t group, const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = owners_.find(group);
    if (found == owners_.end() || found->second != owner) return;
    called_.erase(group);
    owners_.erase(found);
  }
  void count(int64_t group, Claim& claim) {
    std::lock_guard<std::mutex> lock(mutex_);
    claim.others = called_;
    claim.others.erase(group);
    claim.number = called_[group]++;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, int64_t> called_;
  std::map<int64_t, const void*> owners_;
};

inline Groups& groups() {
  static auto* only = new Groups;
  return *only;
}

// -- what NCCL refuses ---------------------------------------------------------------------------------------------------

inline bool is_known(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar: case at::kByte: case at::kBool: case at::kInt: case at::kLong: case at::kFloat: case at::kDouble:
    case at::kHalf: case at::kBFloat16: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2: return true;
    default: return false;
  }
}

inline void check(Kind kind, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "testccl: ", name_of(kind), " without a tensor");
  for (auto& tensor : tensors) {
    TORCH_CHECK(ours(tensor), "testccl: ", name_of(kind), " takes tensors on testdev, got one on ", tensor.device());
    TORCH_CHECK(tensor.layout() == at::kStrided, "testccl: ", name_of(kind), " takes dense tensors, got a sparse one");
    TORCH_CHECK(tensor.numel() > 0, "testccl: ", name_of(kind), " of an empty tensor");
    TORCH_CHECK(tensor.is_contiguous(), "testccl: ", name_of(kind), " takes contiguous tensors");
    TORCH_CHECK(is_known(tensor.scalar_type()), "testccl: ", name_of(kind), " of ", tensor.scalar_type(), ", a type that NCCL does not have");
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "testccl: ", name_of(kind), " of tensors of different types");
  }
}

inline void check_op(Kind kind, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  TORCH_CHECK(!at::isFloat8Type(tensor.scalar_type()), "testccl: ", name_of(kind), " cannot add up values of ", tensor.scalar_type());
  TORCH_CHECK(
      op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX ||
          op == c10d::ReduceOp::PRODUCT,
      "testccl: ", name_of(kind), " takes SUM, AVG, MIN, MAX and PRODUCT");
  TORCH_CHECK(!(op == c10d::ReduceOp::AVG && tensor.scalar_type() == at::kBool), "testccl: AVG of truth values");
}

// -- one collective ------------------------------------------------------------------------------------------------------

struct Done final : c10d::Work {
  MarkPtr mark;
  std::shared_ptr<Tensors> kept;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool isCompleted() override { return mark->done; }
  bool isSuccess() const override { return true; }
  void synchronize() override { device().wait(current_stream, mark); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    Tensors().swap(*kept);
    return true;
  }
  std::vector<at::Tensor> result() override { return *kept; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

inline at::Tensor host_bytes(const at::Tensor& tensor) { return on_host(tensor).view(-1).view(at::kByte); }

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> inner, const std::string& name)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), stream_(device().new_stream()),
        group_(static_cast<int64_t>(std::hash<std::string>{}(name))), name_(name) {
    groups().add(group_, this);
  }
  ~Backend() override { groups().remove(group_, this); }

  const std::string getBackendName() const override { return "testccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduction(Kind::AllReduce, tensors, tensors, options.reduceOp, 0, [inner = inner_, options = options](Tensors in, Tensors, c10d::ReduceOp op) mutable {
      options.reduceOp = op;
      return inner->allreduce(in, options);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    WorkPtr last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, options);
    }
    return last;
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduction(Kind::Reduce, tensors, tensors, options.reduceOp, options.rootRank, [inner = inner_, options = options](Tensors in, Tensors, c10d::ReduceOp op) mutable {
      options.reduceOp = op;
      return inner->reduce(in, options);
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    check_sizes(Kind::ReduceScatter, in, out);
    return reduction(Kind::ReduceScatter, {in}, {out}, options.reduceOp, 0, [inner = inner_, options = options](Tensors in, Tensors out, c10d::ReduceOp op) mutable {
      options.reduceOp = op;
      return inner->_reduce_scatter_base(out[0], in[0], options);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return move(Kind::Broadcast, tensors, tensors, options.rootRank, [inner = inner_, options](Tensors in, Tensors) {
      return inner->broadcast(in, options);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(out.size() == 1 && in.size() == 1, "testccl: all_gather takes one tensor per rank");
    check_list(Kind::AllGather, out[0], in[0]);
    return move(Kind::AllGather, in, out[0], 0, [inner = inner_, options](Tensors in, Tensors out) {
      std::vector<Tensors> rows{out};
      return inner->allgather(rows, in, options);
    });
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    check_sizes(Kind::AllGather, out, in);
    return move(Kind::AllGather, {in}, {out}, 0, [inner = inner_, options](Tensors in, Tensors out) {
      return inner->_allgather_base(out[0], in[0], options);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t k = 0; k < in.size(); k++) last = _allgather_base(out[k], in[k], options);
    return last;
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t k = 0; k < in.size(); k++) last = _reduce_scatter_base(out[k], in[k], options);
    return last;
  }

  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    const bool even = out_splits.empty() && in_splits.empty();
    TORCH_CHECK(!even || (in.size(0) % size_ == 0 && in.numel() == out.numel()), "testccl: all_to_all: ", in.numel(), " values do not divide among ", size_, " ranks");
    // Splits count rows; gloo moves bytes. They differ between ranks, so only even calls can be compared.
    auto in_bytes = in_splits, out_bytes = out_splits;
    for (auto& rows : in_bytes) rows *= static_cast<int64_t>(in.nbytes()) / in.size(0);
    for (auto& rows : out_bytes) rows *= static_cast<int64_t>(out.nbytes()) / out.size(0);
    return move(Kind::AllToAll, {in}, {out}, 0, [inner = inner_, options = options, in_bytes, out_bytes](Tensors in, Tensors out) mutable {
      return inner->alltoall_base(out[0], in[0], out_bytes, in_bytes, options);
    }, even);
  }

  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    const auto rows = out.empty() ? Tensors() : out[0];
    if (!rows.empty()) check_list(Kind::Gather, rows, in.at(0));
    return move(Kind::Gather, in, rows, options.rootRank, [inner = inner_, options](Tensors in, Tensors out) {
      std::vector<Tensors> rows;
      if (!out.empty()) rows.push_back(out);
      return inner->gather(rows, in, options);
    }, false);
  }

  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    const auto rows = in.empty() ? Tensors() : in[0];
    if (!rows.empty()) check_list(Kind::Scatter, rows, out.at(0));
    return move(Kind::Scatter, rows, out, options.rootRank, [inner = inner_, options](Tensors in, Tensors out) {
      std::vector<Tensors> rows;
      if (!in.empty()) rows.push_back(in);
      return inner->scatter(out, rows, options);
    }, false);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto one = new_like(at::empty({1}, at::TensorOptions().dtype(at::kByte).device(at::kMeta)));
    Tensors tensors{one};
    auto work = move(Kind::Barrier, tensors, tensors, 0, [inner = inner_](Tensors, Tensors) { return inner->barrier(c10d::BarrierOptions()); });
    device().synchronize(stream_, "barrier");
    return work;
  }

  void abort() override { inner_->abort(); }
  void shutdown() override {
    groups().remove(group_, this);
    inner_->shutdown();
  }

 private:
  using Move = std::function<WorkPtr(Tensors, Tensors)>;
  using Sum = std::function<WorkPtr(Tensors, Tensors, c10d::ReduceOp)>;

  void check_sizes(Kind kind, const at::Tensor& large, const at::Tensor& small) const {
    TORCH_CHECK(
        large.numel() == small.numel() * size_, "testccl: ", name_of(kind), ": ", large.numel(), " values are not ", size_, " times ",
        small.numel());
  }

  void check_list(Kind kind, const Tensors& rows, const at::Tensor& one) const {
    TORCH_CHECK(rows.size() == static_cast<size_t>(size_), "testccl: ", name_of(kind), " takes a tensor for each of ", size_, " ranks, got ", rows.size());
    for (auto& row : rows)
      TORCH_CHECK(row.numel() == one.numel(), "testccl: ", name_of(kind), " of tensors of different sizes: ", row.numel(), " and ", one.numel());
  }

  // Whatever the type of the values, gloo moves bytes.
  WorkPtr move(Kind kind, Tensors in, Tensors out, int64_t root, Move start, bool comparable = true) {
    Tensors from, to;
    for (auto& tensor : in) from.push_back(tensor.is_contiguous() ? host_bytes(tensor) : tensor);
    for (auto& tensor : out) to.push_back(tensor.is_contiguous() ? host_bytes(tensor) : tensor);
    return collective(kind, in, out, root, comparable, [start, from, to] { return start(from, to); }, nullptr);
  }

  // gloo has no mean and no truth values.
  WorkPtr reduction(Kind kind, Tensors in, Tensors out, c10d::ReduceOp op, int64_t root, Sum start) {
    check(kind, in);
    check_op(kind, op, in[0]);
    const bool mean = op == c10d::ReduceOp::AVG, truth = in[0].scalar_type() == at::kBool;
    Tensors from, to;
    for (auto& tensor : in) from.push_back(truth ? host_bytes(tensor) : on_host(tensor).view(-1));
    for (auto& tensor : out) to.push_back(truth ? host_bytes(tensor) : on_host(tensor).view(-1));
    auto used = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : truth && op == c10d::ReduceOp::SUM ? c10d::ReduceOp(c10d::ReduceOp::MAX) : op;
    auto finish = [to, mean, size = size_] {
      Plain plain;
      for (auto& tensor : to)
        if (mean) at::isIntegralType(tensor.scalar_type(), false) ? tensor.floor_divide_(size) : tensor.div_(size);
    };
    const auto detail = 100 * root + static_cast<int64_t>(op.op_);
    return collective(kind, in, out, detail, true, [start, from, to, used] { return start(from, to, used); }, finish);
  }

  WorkPtr collective(
      Kind kind, const Tensors& in, const Tensors& out, int64_t detail, bool comparable, std::function<WorkPtr()> start,
      std::function<void()> finish) {
    Tensors all = in;
    all.insert(all.end(), out.begin(), out.end());
    check(kind, all);
    Claim claim{kind, all[0].scalar_type(), comparable ? count(in) : 0, comparable ? count(out) : 0, detail, 0, 0, {}};
    groups().count(group_, claim);
    device().counters.collectives++;
    auto work = c10::make_intrusive<Done>();
    work->kept = std::make_shared<Tensors>(all);
    device().wait(stream_, device().record(current_stream));
    device().push(stream_, tasks(claim, std::move(start), std::move(finish), work->kept, bytes(all)));
    work->mark = device().record(stream_);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{here()});
    c10::StreamGuard on(stream_of(stream_));
    work->future->markCompleted(c10::IValue(out));
    return work;
  }

  static int64_t count(const Tensors& tensors) {
    int64_t numel = 0;
    for (auto& tensor : tensors) numel += tensor.numel();
    return numel;
  }

  static double bytes(const Tensors& tensors) {
    double sum = 0;
    for (auto& tensor : tensors) sum += static_cast<double>(tensor.nbytes());
    return sum;
  }

  // Announce the collective to the other ranks; compare what they announce and start it; wait for its end.
  std::vector<Task> tasks(
      Claim claim, std::function<WorkPtr()> begin, std::function<void()> finish, std::shared_ptr<Tensors> kept, double moved) {
    struct Stage {
      at::Tensor sent, claims;
      WorkPtr announced, running;
    };
    auto stage = std::make_shared<Stage>();
    const auto what = c10::str(name_of(claim.kind), " (collective ", claim.number + 1, " of group ", name_, ")");
    const Time cost = nanoseconds(device().costs.collective_us + moved / device().costs.link_bytes_per_us);
    auto inner = inner_;
    const int rank = rank_, size = size_;
    std::vector<Task> tasks(3);
    tasks[0].run = [=](Time start) mutable {
      device().guarded(what, [&] {
        Plain plain;
        claim.start = start;
        stage->sent = claim.pack();
        stage->claims = at::empty({size * static_cast<int64_t>(Claim::LENGTH)}, at::kLong);
        stage->announced = inner->_allgather_base(stage->claims, stage->sent, c10d::AllgatherOptions());
      });
      return start;
    };
    tasks[1].ready = [=] { return !stage->announced || stage->announced->isCompleted(); };
    tasks[1].run = [=](Time start) {
      Time latest = start;
      device().guarded(what, [&] {
        Plain plain;
        if (!stage->announced) return;
        stage->announced->wait();
        latest = compare(stage->claims, rank);
        stage->running = begin();
      });
      return latest;
    };
    tasks[2].ready = [=] { return !stage->running || stage->running->isCompleted(); };
    tasks[2].run = [=, kept = std::move(kept)](Time start) {  // until then the tensors are kept, unless wait() was called
      device().guarded(what, [&] {
        if (!stage->running) return;
        stage->running->wait();
        if (finish) finish();
      });
      return start + cost;
    };
    return tasks;
  }

  // Raises unless all ranks do the same. Returns when the last of them starts.
  static Time compare(const at::Tensor& claims, int rank) {
    std::vector<Claim> all;
    const auto values = claims.const_data_ptr<int64_t>();
    for (int64_t k = 0; k < claims.numel(); k += Claim::LENGTH) all.push_back(Claim::unpack(values + k));
    const auto& mine = all[rank];
    Time latest = 0;
    for (size_t other = 0; other < all.size(); other++) {
      TORCH_CHECK(
          mine.same_call(all[other]), "the ranks do not call the same collective: rank ", rank, " calls ", mine.text(), ", rank ", other,
          " calls ", all[other].text(), ". All ranks of a group must call the same ones in the same order");
      TORCH_CHECK(
          mine.same_order(all[other]), "ranks ", rank, " and ", other,
          " have used their other groups in another order: with NCCL, groups that are in use at the same time need the same order on all ranks");
      latest = std::max(latest, all[other].start);
    }
    return latest;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  const StreamId stream_;
  const int64_t group_;
  const std::string name_;
};

}  // namespace testdev
