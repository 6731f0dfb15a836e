#include "threads.h"

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace conv2d_ext::fuzz {

namespace {

struct Job {
  int64_t items = 0;
  void* context = nullptr;
  void (*body)(void*, int64_t) = nullptr;
  int threads = 1;
  Schedule schedule = Schedule::kDealt;
  std::atomic<int64_t> next{0};

  void work(int thread) {
    switch (schedule) {
      case Schedule::kTaken:
        for (int64_t item = next++; item < items; item = next++) body(context, item);
        break;
      case Schedule::kBlocks:
        for (int64_t item = items * thread / threads; item < items * (thread + 1) / threads; ++item) {
          body(context, item);
        }
        break;
      default:
        for (int64_t item = thread; item < items; item += threads) body(context, item);
    }
  }
};

class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(Job& job) {
    std::fegetenv(&environment_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < job.threads - 1) {
        workers_.emplace_back([this, number = int(workers_.size()) + 1] { serve(number); });
        seen_.push_back(round_);
      }
      job_ = &job;
      threads_ = job.threads;
      busy_ = job.threads - 1;
      ++round_;
    }
    start_.notify_all();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return stop_ || round_ != seen_[size_t(number - 1)]; });
      if (stop_) return;
      seen_[size_t(number - 1)] = round_;
      if (number >= threads_) continue;  // the job may be gone already
      Job& job = *job_;
      lock.unlock();
      std::fesetenv(&environment_);
      job.work(number);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  std::vector<int64_t> seen_;
  Job* job_ = nullptr;
  std::fenv_t environment_;
  int64_t round_ = 0;
  int threads_ = 0, busy_ = 0;
  bool stop_ = false;
};

int wanted_threads = 1;
Schedule wanted_schedule = Schedule::kDealt;

void run(int64_t items, void* context, void (*body)(void*, int64_t)) {
  static Pool pool;
  if (wanted_schedule == Schedule::kBackwards) {
    for (int64_t item = items; item-- > 0;) body(context, item);
    return;
  }
  Job job;
  job.items = items;
  job.context = context;
  job.body = body;
  job.threads = int(wanted_threads < items ? wanted_threads : items);
  job.schedule = wanted_schedule;
  if (job.threads == 1) {
    job.work(0);
  } else {
    pool.run(job);
  }
}

}  // namespace

cpu::Executor executor(int threads, Schedule schedule) {
  wanted_threads = threads;
  wanted_schedule = schedule;
  return {threads, run};
}

}  // namespace conv2d_ext::fuzz
