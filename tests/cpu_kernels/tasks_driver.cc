// Many small calls of run_tasks from several threads at once, under ThreadSanitizer. Every task must
// run once, no two at a time in one place of scratch memory, a pool that runs nothing must not stop
// a call, and calls at once must not ask for more helpers than one may use. With an argument the
// tasks of a call share a number, which the sanitizer must find.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "tasks.h"

using namespace kvq;

namespace {

constexpr int kThreads = 3, kCallers = 4, kCalls = 2000;

// Threads that run what they are given, with pauses in which helpers lose their patience.
class Pool {
 public:
  Pool() {
    for (int i = 0; i < kThreads; i++) threads_.emplace_back([this] { run(); });
  }

  ~Pool() {
    stop_ = true;
    for (auto& thread : threads_) thread.join();
  }

  void add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }

 private:
  void run() {
    while (true) {
      std::function<void()> work;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!queue_.empty()) work = std::move(queue_.back()), queue_.pop_back();
        else if (stop_) return;
      }
      if (work) work();
      else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::mutex mutex_;
  std::vector<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
};

int64_t call(int caller, int round, const Schedule& schedule, bool race) {
  const int64_t count = 1 + (7 * round + caller) % 13;
  std::vector<int64_t> runs(count), scratch(kThreads + 1);
  int64_t shared = 0, wrong = 0;
  run_tasks(count, kThreads, schedule, [&](int64_t task, int64_t worker) {
    runs[task]++;
    scratch.at(worker) += task;
    if (race) shared++;
  });
  for (const int64_t times : runs) wrong += times != 1;
  return wrong;
}

// How many helpers calls at once ask a slow pool for that runs nothing.
int helpers_of_callers() {
  std::mutex mutex;
  std::vector<std::function<void()>> asked;
  const Schedule schedule = [&](std::function<void()> work) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::lock_guard<std::mutex> lock(mutex);
    asked.push_back(std::move(work));
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; i++)
    callers.emplace_back([&] { run_tasks(9, kThreads, schedule, [](int64_t, int64_t) {}); });
  for (auto& caller : callers) caller.join();
  return int(asked.size());
}

}  // namespace

int main(int count, char**) {
  std::atomic<int64_t> wrong{0};
  {
    Pool pool;
    const Schedule schedule = [&](std::function<void()> work) { pool.add(std::move(work)); };
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kCallers; caller++)
      callers.emplace_back([&, caller] {
        for (int round = 0; round < kCalls; round++) {
          wrong += call(caller, round, schedule, count > 1);
          if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(round % 400));
        }
      });
    for (auto& caller : callers) caller.join();
  }
  for (int round = 0; round < 100; round++)
    wrong += call(0, round, [](std::function<void()>) {}, false);
  const int helpers = helpers_of_callers();
  std::printf("%d calls, %d tasks that did not run once, %d of %d helpers\n", kCallers * kCalls,
              int(wrong.load()), helpers, kThreads);
  return wrong != 0 || helpers != kThreads;
}
