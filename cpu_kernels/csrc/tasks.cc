#include "tasks.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace kvq {
namespace {

struct Tasks {
  const int64_t count;
  const std::function<void(int64_t, int64_t)> task;
  std::atomic<int64_t> workers{0}, next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  Tasks(int64_t count, std::function<void(int64_t, int64_t)> task)
      : count(count), task(std::move(task)) {}

  // Run tasks until all have begun.
  void work() {
    const int64_t worker = workers++;
    for (int64_t i = next++; i < count; i = next++) {
      task(i, worker);
      if (++done == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }

  // Wait for the tasks that other threads have begun.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done == count; });
  }
};

}  // namespace

void run_tasks(int64_t count, int64_t helpers, const Schedule& schedule,
               std::function<void(int64_t, int64_t)> task) {
  if (count < 1) return;
  // Helpers that begin after the call has returned find no task. Until then they keep the counters
  // alive.
  const auto tasks = std::make_shared<Tasks>(count, std::move(task));
  try {
    for (int64_t i = 0; i < helpers; i++) schedule([tasks] { tasks->work(); });
  } catch (...) {  // No memory for another helper: the existing ones must not be left alone.
  }
  tasks->work();
  tasks->wait();
}

}  // namespace kvq
