// Calls functions of a library for a Python process that runs on another kind of processor; emulation.py is the caller.
//
// A request consists of a function's name, regions of the caller's memory with their contents, the addresses of words
// in them that are addresses themselves, and the arguments. A region with the same address and length as an earlier
// one is stored in the same place, because a decoder keeps addresses between calls. The response is the result and
// all regions.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

void transfer(bool reads, void* data, size_t size) {
  for (auto* at = static_cast<char*>(data); size > 0;) {
    const ssize_t done = reads ? read(0, at, size) : write(1, at, size);
    if (done <= 0) std::exit(0);  // the caller has ended
    at += done;
    size -= done;
  }
}
uint64_t receive() {
  uint64_t word;
  transfer(true, &word, sizeof word);
  return word;
}

using Region = std::pair<uint64_t, uint64_t>;  // address in the caller's memory, and size in bytes
std::map<Region, char*> memory;

char* own_memory(const Region& region) {
  char*& own = memory[region];
  if (!own) own = static_cast<char*>(std::aligned_alloc(64, region.second / 64 * 64 + 128)) + region.first % 64;
  return own;
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    const std::string reason = dlerror();
    (void)!write(2, reason.data(), reason.size());
    return 1;
  }
  for (;;) {
    std::string name(receive(), ' ');
    transfer(true, name.data(), name.size());
    std::vector<Region> regions(receive());
    for (Region& region : regions) {
      region.first = receive();
      region.second = receive();
      transfer(true, own_memory(region), region.second);
    }
    const auto translated = [&](uint64_t address) {
      for (const Region& region : regions)
        if (region.first <= address && address < region.first + region.second)
          return own_memory(region) + (address - region.first);
      return static_cast<char*>(nullptr);
    };
    for (uint64_t left = receive(); left > 0; --left) {
      char* word = translated(receive());
      uint64_t address;
      std::memcpy(&address, word, sizeof address);
      char* own = translated(address);
      std::memcpy(word, &own, sizeof own);
    }
    uint64_t values[12] = {};
    const uint64_t count = receive();
    for (uint64_t i = 0; i < count; ++i) {
      const bool is_address = receive();
      values[i] = receive();
      if (is_address) values[i] = reinterpret_cast<uint64_t>(translated(values[i]));
    }
    using Function = uint64_t(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t);
    auto* function = reinterpret_cast<Function*>(dlsym(library, name.c_str()));
    const auto& v = values;
    uint64_t result = function(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11]);
    transfer(false, &result, sizeof result);
    for (const Region& region : regions) transfer(false, own_memory(region), region.second);
  }
}
