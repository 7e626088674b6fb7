// The threads that compute one product after another and wait for each other at barriers every few microseconds.
//
// A waiting thread spins for a moment and then sleeps: if other programs want the processors too, a spinning thread may
// occupy the processor of the thread that it waits for. Spinning is limited by a clock, because the duration of a pause
// instruction differs between processors by two orders of magnitude. If threads spin in vain in most calls, they sleep
// at once for some calls: Linux prefers a thread that wakes up, but not one that spins, to a program that never sleeps.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "lanes.h"

namespace inflight {

class Team {
 public:
  // spin: how long a waiting thread spins before it sleeps.
  explicit Team(int size, std::chrono::microseconds spin = std::chrono::microseconds(0))
      : size_(size), spin_(spin), hands_(size) {
    sigset_t all, before;  // the program's own threads handle signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int thread = 1; thread < size; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      end();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Team() { end(); }

  int size() const { return size_; }

  // Calls f(thread) on each thread, the caller being thread 0; returns when all have returned. One caller at a time.
  template <class F>
  void run(const F& f) {
    call_ = [](const void* data, int thread) { (*static_cast<const F*>(data))(thread); };
    data_ = &f;
    choose_wait();
    advance(job_);
    f(0);
    barrier();
  }

  void barrier() {
    const uint32_t phase = phase_.value.load(std::memory_order_acquire);
    const bool spins = spins_;  // after the last thread's arrival, the next call may change it
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      advance(phase_);
    } else if (!wait(phase_, phase, spins)) {
      spun_in_vain_.store(true, std::memory_order_relaxed);
    }
  }

  // Whether threads spin at the barriers of the current call.
  bool spins() const { return spins_; }

  // Assigns a thread its part of the numbers 0 .. count - 1, to be processed by `share` after a barrier.
  void deal(int64_t count, int thread) {
    const auto begin = static_cast<uint64_t>(count * thread / size_);
    const auto end = static_cast<uint64_t>(count * (thread + 1) / size_);
    hands_[thread].left.store(end << 32 | begin, std::memory_order_relaxed);
  }

  // Calls f(number) for a thread's own part, ascending, and then for the numbers that other threads have left, from the
  // end of their parts. So threads take numbers by their speed: a slow core gets fewer, and if another program takes a
  // thread's processor, the thread's numbers do not wait for it.
  template <class F>
  void share(int thread, const F& f) {
    for (int64_t number; (number = take(hands_[thread].left, true)) >= 0;) f(number);
    for (int other = thread + 1; other < thread + size_; ++other)
      for (int64_t number; (number = take(hands_[other % size_].left, false)) >= 0;) f(number);
  }

 private:
  static constexpr int kMostFailures = 8;
  static constexpr int kCallsWithout = 64;
  static constexpr int kPauses = 64;  // between looks at the clock: less than some microseconds

  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
  };
  struct alignas(64) Hand {
    std::atomic<uint64_t> left{0};  // the first number, and in the upper half the number after the last
  };

  void end() {
    call_ = nullptr;
    advance(job_);
    for (auto& worker : workers_) worker.join();
  }

  void work(int thread) {
    for (uint32_t seen = 0;;) {
      wait(job_, seen, true);
      ++seen;
      if (!call_) return;
      call_(data_, thread);
      barrier();
    }
  }

  // Takes the first or the last of the remaining numbers; -1 if there are none.
  static int64_t take(std::atomic<uint64_t>& left, bool first) {
    for (uint64_t old = left.load(std::memory_order_relaxed);;) {
      const uint64_t begin = old & UINT32_MAX, end = old >> 32;
      if (begin >= end) return -1;
      const uint64_t rest = first ? old + 1 : old - (uint64_t{1} << 32);
      if (left.compare_exchange_weak(old, rest, std::memory_order_relaxed)) return first ? begin : end - 1;
    }
  }

  static void advance(Word& word) {
    word.value.fetch_add(1);
    if (word.sleepers.load()) syscall(SYS_futex, &word.value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Decides whether threads spin in the next call. A call in which one spun in vain adds 2, and any other subtracts 1.
  // At 8 threads do not spin for 64 calls; a single call in vain after those repeats that. (With the processors for
  // themselves, threads spin in vain in a tenth of the calls, and beside a busy loop in five of six.)
  void choose_wait() {
    if (spins_) {
      failures_ = spun_in_vain_.exchange(false) ? std::min(failures_ + 2, kMostFailures) : std::max(failures_ - 1, 0);
      calls_without_ = failures_ == kMostFailures ? kCallsWithout : 0;
    } else {
      --calls_without_;
    }
    spins_ = calls_without_ == 0;
  }

  // Waits until `word` is not `old`. Returns false if the thread spun in vain before it slept.
  bool wait(Word& word, uint32_t old, bool spins) const {
    using Clock = std::chrono::steady_clock;
    const auto is_over = [&] { return word.value.load(std::memory_order_acquire) != old; };
    if (is_over()) return true;
    const auto spin = spins ? spin_ : std::chrono::microseconds(0);
    for (const auto end = Clock::now() + spin; Clock::now() < end;) {
      for (int i = 0; i < kPauses; ++i) {
        if (is_over()) return true;
        spin_pause();
      }
    }
    word.sleepers.fetch_add(1);
    while (word.value.load() == old)
      syscall(SYS_futex, &word.value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    word.sleepers.fetch_sub(1);
    return !spins;
  }

  const int size_;
  const std::chrono::microseconds spin_;
  void (*call_)(const void*, int) = nullptr;
  const void* data_ = nullptr;
  bool spins_ = true;
  int failures_ = 0;       // 0 to kMostFailures, see choose_wait
  int calls_without_ = 0;  // further calls in which no thread spins
  std::atomic<bool> spun_in_vain_{false};
  Word job_, phase_;
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<Hand> hands_;
  std::vector<std::thread> workers_;
};

// Calls f(thread, number of threads) on several threads, or on the caller's alone if no others can be started.
template <class F>
void in_parallel(int num_threads, const F& f) {
  std::unique_ptr<Team> team;
  try {
    team = std::make_unique<Team>(num_threads);
  } catch (const std::exception&) {
    f(0, 1);
    return;
  }
  team->run([&](int thread) { f(thread, num_threads); });
}

}  // namespace inflight
