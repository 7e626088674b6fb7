"""The threads of compiled layers: how they share tasks, and how they wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.errors import ConfigError
from inflight.testing.make_model import make_model
from tests.engine.cpu.programs import compile_program, exit_status
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native

pytestmark = needs_native

PROGRAM = """
#include <dirent.h>
#include <cstdio>
#include "team.h"
using namespace inflight;
int slow_thread() {
  constexpr int kTasks = 100;
  Team team(3);
  std::atomic<int> done[3] = {{}, {}, {}};
  std::atomic<bool> is_begun{false};
  team.run([&](int thread) {
    team.deal(kTasks, thread);
    team.barrier();
    team.share(thread, [&](int64_t) {
      if (thread == 2) {  // takes as long for one task as the others for all the rest
        is_begun = true;
        while (done[0] + done[1] < kTasks - 1) std::this_thread::yield();
      }
      while (!is_begun) std::this_thread::yield();
      ++done[thread];
    });
  });
  return done[2] == 1 && done[0] + done[1] == kTasks - 1 ? 0 : 1;
}
int barriers() {
  for (int spin_us : {0, 50, 2000}) {
    constexpr int kThreads = 4, kSteps = 30;  // more threads than processors on small machines
    Team team(kThreads, std::chrono::microseconds(spin_us));
    int steps[kThreads] = {};
    std::atomic<bool> is_wrong{false};
    for (int job = 0; job < 2; ++job)
      team.run([&](int thread) {
        for (int step = 0; step < kSteps; ++step) {
          ++steps[thread];
          team.barrier();
          for (int other : steps) is_wrong = is_wrong || other != steps[thread];
          team.barrier();
        }
      });
    if (is_wrong || steps[0] != 2 * kSteps) return 1;
  }
  return 0;
}
bool is_asleep(pid_t thread) {
  char path[64], state = 0;
  snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
  FILE* file = fopen(path, "r");
  const int num_read = fscanf(file, "%*d (%*[^)]) %c", &state);
  fclose(file);
  return num_read == 1 && state == 'S';
}
// After 4 calls in which a thread spins in vain, threads sleep at once for 64 calls, and after 1 more again.
int spinning() {
  Team team(2, std::chrono::microseconds(50));
  const pid_t caller = gettid();
  const auto delayed_call_spins = [&] {
    bool spins = false;
    team.run([&](int thread) {
      if (thread == 0) spins = team.spins();
      while (thread == 1 && !is_asleep(caller)) std::this_thread::yield();
    });
    return spins;
  };
  for (int number_spinning : {4, 1, 1}) {
    for (int i = 0; i < number_spinning; ++i)
      if (!delayed_call_spins()) return 1;
    for (int i = 0; i < 64; ++i)
      if (delayed_call_spins()) return 1;
  }
  return 0;
}
int threads() {
  Team team(7);
  DIR* tasks = opendir("/proc/self/task");
  int count = -2;  // "." and ".."
  while (readdir(tasks)) ++count;
  closedir(tasks);
  return count == 7 ? 0 : 1;
}
int main(int, char** arguments) {
  switch (*arguments[1]) {
    case 's': return slow_thread();
    case 'b': return barriers();
    case 'w': return spinning();
    default: return threads();
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("team"), PROGRAM)


def test_other_threads_take_the_tasks_of_a_slow_one(program: Path) -> None:
    assert exit_status(program, "slow thread") == 0


def test_no_thread_passes_a_barrier_before_the_others_reach_it(program: Path) -> None:
    assert exit_status(program, "barriers") == 0


def test_threads_do_not_spin_for_some_calls_after_they_spun_in_vain(program: Path) -> None:
    assert exit_status(program, "waiting") == 0


def test_threads_of_a_team_are_started_when_it_is_made(program: Path) -> None:
    assert exit_status(program, "threads") == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_logits_are_the_same_however_long_threads_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder = make_model(tmp_path, shape="tiny")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    logits = []
    for spin_us in ("0", "", "1000"):
        monkeypatch.setenv("INFLIGHT_CPU_SPIN_US", spin_us)
        engine = load_engine(folder, dtype=dtype, engine_threads=3)
        logits.append(torch.stack(alone(engine, list(range(5, 40)), 8).logits))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("value", ["-1", "1000001", "50us", "\u0661"])
def test_an_invalid_spin_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_SPIN_US", value)
    with pytest.raises(ConfigError, match=f"INFLIGHT_CPU_SPIN_US is '{value}', expected 0 to 1000000"):
        load_engine(make_model(tmp_path, shape="tiny"), kernels="native")
