// Streams as queues, and the schedules by which they run.
//
// A queue holds tasks in order. No thread works on it: tasks run when the host synchronises, in the thread that does, or
// when the schedule says so. A task that waits for a mark of another queue runs that queue up to the mark first, so
// whatever the program has ordered runs in order, and nothing else is certain.
//
// Locks. `mutex_` guards the queues and is held for pushing and popping only, never while a task runs. `turn_` is held
// by the one thread that runs tasks; whoever takes it has given up the GIL before, because tasks may need the GIL.
//
// Time is simulated: a task starts when its queue is free and the host has enqueued it, and ends after its cost. It is
// the same in every run and under every schedule.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace testdev {

using StreamId = int64_t;
using Time = int64_t;  // simulated nanoseconds
constexpr StreamId DEFAULT_STREAM = 0;

// A position in a queue: what an event records.
struct Mark {
  explicit Mark(StreamId stream) : stream(stream) {}
  const StreamId stream;
  std::atomic<bool> done{false};
  std::atomic<Time> time{0};
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  enum class Kind { Work, Record, Wait };
  Kind kind = Kind::Work;
  std::function<Time(Time)> run;  // Work: takes its start and returns its end
  std::function<bool()> ready;        // Work: false while it would block for other ranks; empty: always ready
  MarkPtr mark;                       // Record and Wait
  Time queued = 0;
};

struct Queue {
  std::deque<Task> tasks;
  Time time = 0;
};

enum class Schedule { Lazy, EagerSides, LazySides, Shuffled, Eager };

struct Counters {
  std::atomic<int64_t> host_syncs{0}, launches{0}, collectives{0}, poisoned{0};
};

struct Costs {
  double launch_us = 5, bytes_per_us = 100e3, collective_us = 20, link_bytes_per_us = 10e3;
};

inline Time nanoseconds(double us) { return std::llround(us * 1e3); }

// Gives up the GIL, if this thread has it.
struct WithoutGil {
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

inline std::string text_of(const std::exception& error) {
  if (auto known = dynamic_cast<const c10::Error*>(&error)) return known->what_without_backtrace();
  return error.what();
}

class Device {
 public:
  Counters counters;
  Costs costs;
  std::atomic<bool> capturing{false};

  // -- what the host enqueues ------------------------------------------------------------------------------------

  void push(StreamId id, std::vector<Task> tasks, bool run = true) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& queue = queues_[id];
      for (auto& task : tasks) {
        task.queued = host_time_;
        queue.tasks.push_back(std::move(task));
      }
    }
    if (run) after_push(id);
  }

  void launch(StreamId id, const std::string& name, size_t bytes, std::function<void()> work, bool run = true) {
    Task task;
    const Time cost = nanoseconds(costs.launch_us + static_cast<double>(bytes) / costs.bytes_per_us);
    task.run = [this, name, work = std::move(work), cost](Time start) {
      guarded(name, work);
      return start + cost;
    };
    std::vector<Task> tasks;
    tasks.push_back(std::move(task));
    counters.launches++;
    push(id, std::move(tasks), run);
  }

  MarkPtr record(StreamId id) {
    Task task{Task::Kind::Record};
    task.mark = std::make_shared<Mark>(id);
    auto mark = task.mark;
    push(id, {std::move(task)});
    return mark;
  }

  // Recording without running anything: for destructors.
  MarkPtr record_quietly(StreamId id) {
    Task task{Task::Kind::Record};
    task.mark = std::make_shared<Mark>(id);
    auto mark = task.mark;
    push(id, {std::move(task)}, false);
    return mark;
  }

  void wait(StreamId id, MarkPtr mark) {
    Task task{Task::Kind::Wait};
    task.mark = std::move(mark);
    push(id, {std::move(task)});
  }

  StreamId new_stream() { return next_stream_++; }

  // -- what the host waits for -----------------------------------------------------------------------------------

  void synchronize(StreamId id, const std::string& why) {
    count_sync(why);
    Turn turn(*this);
    advance(id, nullptr, true);
    catch_up(queue(id).time);
    raise_error();
  }

  void synchronize(const MarkPtr& mark, const std::string& why) {
    count_sync(why);
    Turn turn(*this);
    advance(mark->stream, mark.get(), true);
    catch_up(mark->time);
    raise_error();
  }

  void synchronize_all(const std::string& why) {
    if (!why.empty()) count_sync(why);
    Turn turn(*this);
    for (auto id : busy()) advance(id, nullptr, true);
    std::vector<Time> times;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [id, queue] : queues_) times.push_back(queue.time);
    }
    for (auto time : times) catch_up(time);
    raise_error();
  }

  bool is_idle(StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queues_[id].tasks.empty();
  }

  // -- schedules, clock, counters --------------------------------------------------------------------------------

  void set_schedule(Schedule schedule, uint64_t seed) {
    synchronize_all("");
    Turn turn(*this);
    schedule_ = schedule;
    random_.seed(seed);
  }

  double host_us() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<double>(host_time_) / 1e3;
  }

  void advance_host(double us) {
    std::lock_guard<std::mutex> lock(mutex_);
    host_time_ += nanoseconds(us);
  }

  std::map<std::string, int64_t> sync_reasons() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reasons_;
  }

  void reset_counters() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters.host_syncs = counters.launches = counters.collectives = counters.poisoned = 0;
    reasons_.clear();
  }

  // Run `work`; its error is kept for the next synchronisation. Called by tasks.
  void guarded(const std::string& name, const std::function<void()>& work) {
    if (failed_) return;
    try {
      work();
    } catch (const std::exception& error) {
      fail(name + " failed: " + text_of(error));
    }
  }

  bool failed() const { return failed_; }

 private:
  // The right to run tasks. A thread that waits for it has no GIL.
  struct Turn {
    explicit Turn(Device& device) : lock(device.turn_) {}
    WithoutGil without_gil;
    std::lock_guard<std::recursive_mutex> lock;
  };

  Queue& queue(StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queues_[id];  // references to elements of a map stay valid
  }

  Task* front(Queue& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue.tasks.empty() ? nullptr : &queue.tasks.front();  // only the thread whose turn it is removes it
  }

  std::optional<Task> pop(Queue& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue.tasks.empty()) return std::nullopt;
    std::optional<Task> task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    return task;
  }

  std::vector<StreamId> busy() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<StreamId> ids;
    for (auto& [id, queue] : queues_)
      if (!queue.tasks.empty()) ids.push_back(id);
    return ids;
  }

  // Run a queue in order up to a mark, or to its end, or for at most so many tasks.
  void advance(StreamId id, const Mark* until, bool may_block, int64_t most = -1) {
    auto& here = queue(id);
    while (most-- != 0 && !(until && until->done)) {
      auto next = front(here);
      if (!next || (!may_block && !can_run(*next))) return;
      auto task = pop(here);
      if (!task) return;  // can_run has run into an error, after which all queues are empty
      execute(here, *task);
    }
  }

  bool can_run(Task& task) {
    if (task.kind != Task::Kind::Wait) return !task.ready || task.ready();
    auto mark = task.mark;
    if (!mark->done) advance(mark->stream, mark.get(), false);
    return mark->done;
  }

  void execute(Queue& queue, Task& task) {
    const Time start = std::max(queue.time, task.queued);
    if (task.kind == Task::Kind::Wait) {
      if (!task.mark->done) advance(task.mark->stream, task.mark.get(), true);
      queue.time = std::max(start, task.mark->time.load());
    } else if (task.kind == Task::Kind::Record) {
      queue.time = start;
      task.mark->time = start;
      task.mark->done = true;
    } else {
      queue.time = task.run(start);
    }
  }

  void after_push(StreamId id) {
    const bool side = id != DEFAULT_STREAM;
    switch (schedule_) {
      case Schedule::Lazy: return;
      case Schedule::EagerSides: if (!side) return; break;
      case Schedule::LazySides: if (side) return; break;
      case Schedule::Shuffled: return shuffle();
      case Schedule::Eager: break;
    }
    Turn turn(*this);
    advance(id, nullptr, true);
  }

  // Every other time, a few tasks of a stream by chance; never one that would block the host for another rank.
  void shuffle() {
    Turn turn(*this);
    auto ids = busy();
    if (random_() % 2 || ids.empty()) return;
    const auto id = ids[random_() % ids.size()];
    advance(id, nullptr, false, 1 + static_cast<int64_t>(random_() % 8));
  }

  void count_sync(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters.host_syncs++;
    reasons_[why]++;
  }

  void catch_up(Time time) {
    std::lock_guard<std::mutex> lock(mutex_);
    host_time_ = std::max(host_time_, time);
  }

  // After an error nothing that is queued runs any more; nobody must wait for it.
  void fail(const std::string& text) {
    error_ = "testdev: " + text;
    failed_ = true;
    drop_all();
  }

  void drop_all() {
    std::vector<std::deque<Task>> dropped;  // destroyed without the lock: tasks own tensors and Python objects
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [id, queue] : queues_) {
        dropped.emplace_back();
        dropped.back().swap(queue.tasks);
      }
    }
    for (auto& tasks : dropped)
      for (auto& task : tasks)
        if (task.kind == Task::Kind::Record) task.mark->done = true;
  }

  void raise_error() {
    if (!failed_) return;
    drop_all();
    failed_ = false;
    throw std::runtime_error(error_);
  }

  std::mutex mutex_;
  std::recursive_mutex turn_;
  std::map<StreamId, Queue> queues_;
  std::map<std::string, int64_t> reasons_;
  std::atomic<StreamId> next_stream_{1};
  std::atomic<Schedule> schedule_{Schedule::Lazy};
  std::mt19937_64 random_;
  Time host_time_ = 0;
  std::atomic<bool> failed_{false};
  std::string error_;
};

// Never destroyed: threads and tensors may outlive the end of main().
inline Device& device() {
  static auto* only = new Device;
  return *only;
}

inline thread_local StreamId current_stream = DEFAULT_STREAM;

}  // namespace testdev
