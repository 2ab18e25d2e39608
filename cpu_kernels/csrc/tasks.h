// Independent tasks on the threads of XLA.
#pragma once

#include <cstdint>
#include <functional>

namespace kvq {

// Runs `work` on another thread, later or never: the caller of run_tasks runs the tasks that no
// other thread has begun.
using Schedule = std::function<void(std::function<void()> work)>;

// Run task(i, worker) for i = 0 .. count - 1, begun in this order, and return when all have ended.
// `worker` is 0 .. helpers. `helpers` is how many threads `schedule` may use besides this one. A
// task must not throw: a helper could not report it.
void run_tasks(int64_t count, int64_t helpers, const Schedule& schedule,
               std::function<void(int64_t task, int64_t worker)> task);

}  // namespace kvq
