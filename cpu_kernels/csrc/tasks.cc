#include "tasks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kvq {
namespace {

using Clock = std::chrono::steady_clock;

// A decode step makes some 150 calls with gaps of 10 to 100 microseconds, and waking a sleeping
// thread takes as long as many of them. But a helper that looks for the next call is missed by
// what XLA computes before it. So a helper stays after a short gap alone, and for twice as long.
constexpr std::chrono::microseconds kShortGap{50}, kCallerSpins{100};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Return true as soon as `ready` does, or false after `limit`.
template <class Ready>
bool spin(std::chrono::nanoseconds limit, const Ready& ready) {
  constexpr int kLooks = 16;  // for each look at the clock
  if (ready()) return true;
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < kLooks; i++, pause())
      if (ready()) return true;
  } while (Clock::now() < end);
  return false;
}

// The tasks of one call.
class Tasks {
 public:
  Tasks(int64_t count, int64_t helpers, std::function<void(int64_t, int64_t)> task)
      : count_(count), places_(helpers), task_(std::move(task)) {}

  // Reserve the place of a helper, if one is left.
  bool admit() { return next_ < count_ && places_-- > 0; }

  // Run tasks until all have begun.
  void work() {
    const int64_t worker = workers_++;
    for (int64_t i = next_++; i < count_; i = next_++) {
      task_(i, worker);
      if (++done_ == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_all();
      }
    }
  }

  // Wait for the tasks that other threads have begun.
  void wait() {
    const auto ended = [this] { return done_ == count_; };
    if (spin(kCallerSpins, ended)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, ended);
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> places_, workers_{0}, next_{0}, done_{0};
  const std::function<void(int64_t, int64_t)> task_;
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// The calls in progress, and the threads that help at whichever of them has tasks left.
class Board {
 public:
  // Show tasks to helpers, and ask for as many more threads as the call may use and nobody has
  // asked for yet.
  void offer(const std::shared_ptr<Tasks>& tasks, int64_t helpers, const Schedule& schedule) {
    std::vector<std::shared_ptr<Thread>> missing;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (calls_.empty()) {
        const std::chrono::nanoseconds gap = Clock::now() - last_end_;
        lingers_ = gap < kShortGap ? 2 * gap.count() : 0;
      }
      calls_.push_back(tasks);
      offers_++;
      // They count before the next caller looks.
      while (threads_ < helpers) missing.push_back(std::make_shared<Thread>(threads_));
    }
    for (auto& thread : missing) schedule([this, thread = std::move(thread)] { help(); });
  }

  void withdraw(const std::shared_ptr<Tasks>& tasks) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.erase(std::remove(calls_.begin(), calls_.end(), tasks), calls_.end());
    last_end_ = Clock::now();
  }

 private:
  // A thread counts from when it is asked for until it leaves, or until the pool that should have
  // run it is gone.
  struct Thread {
    std::atomic<int64_t>& threads;
    explicit Thread(std::atomic<int64_t>& threads) : threads(threads) { threads++; }
    ~Thread() { threads--; }
  };

  // Work for one call after the other, until none has come for a while.
  void help() {
    int64_t seen;
    do {
      while (const auto tasks = join(seen)) tasks->work();
    } while (spin(std::chrono::nanoseconds(lingers_), [&] { return offers_ != seen; }));
  }

  std::shared_ptr<Tasks> join(int64_t& seen) {
    std::lock_guard<std::mutex> lock(mutex_);
    seen = offers_;
    for (const auto& tasks : calls_)
      if (tasks->admit()) return tasks;
    return nullptr;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Tasks>> calls_;
  std::atomic<int64_t> offers_{0}, threads_{0};
  std::atomic<int64_t> lingers_{0};  // nanoseconds
  Clock::time_point last_end_;       // of a call
};

// Never destroyed, because threads of XLA may outlive static objects.
Board& board() {
  static Board* const only = new Board;
  return *only;
}

}  // namespace

void run_tasks(int64_t count, int64_t helpers, const Schedule& schedule,
               std::function<void(int64_t, int64_t)> task) {
  helpers = std::min(helpers, count - 1);
  if (helpers < 1) {
    for (int64_t i = 0; i < count; i++) task(i, 0);
    return;
  }
  // A helper may still hold the tasks when the call has returned. It finds none to run.
  const auto tasks = std::make_shared<Tasks>(count, helpers, std::move(task));
  try {
    board().offer(tasks, helpers, schedule);
  } catch (...) {  // No memory for another helper: the existing ones must not be left alone.
  }
  tasks->work();
  board().withdraw(tasks);
  tasks->wait();
}

}  // namespace kvq
