// device.cuh for a CPU: every thread of a block is a fiber, and blocks run one after the other.
//
// What it checks that a GPU does not: every access to global memory lies within a tensor and is
// aligned; two threads use the same shared memory only with a barrier between (vector clocks, one for
// each thread); copies to shared memory arrive as late as they may, or as early (EARLY_COPIES), and
// nothing touches their place in between. What is wrong is written to `problem`.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <ucontext.h>
#include <vector>

#define DEVICE inline
#define GLOBAL(threads) static void
#define __restrict__

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { unsigned x, y, z; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline u32 __float_as_uint(float v) { u32 r; memcpy(&r, &v, 4); return r; }
inline float __uint_as_float(u32 v) { float r; memcpy(&r, &v, 4); return r; }

static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int STACK = 1 << 19, SHARED = 232448, LANES = 32;
struct Copy { u32 to; const void *from; int size; };
struct Fiber {
  ucontext_t context;  // how it starts
  jmp_buf place;       // how it goes on: a jump asks nothing of the operating system
  bool started = false, done = false;
  std::function<bool()> ready;           // what it waits for
  std::deque<std::vector<Copy>> groups;  // copies that are under way
  std::vector<Copy> open;
  std::vector<int> clock;
};
struct Word { int writer = -1, written = 0; std::map<int, int> readers; };
struct Bar { long phase = 0, arrived = 0, needed = 0, bytes = 0; std::vector<Copy> copies; std::vector<int> clock; };
struct Meeting { int arrived = 0; long round = 0; std::vector<int> clock, left; };
struct Exchange { int arrived = 0, taken = 0; long round = 0; u32 a[LANES][4]; u32 b[LANES][2]; float d[LANES][4]; };

static std::string problem;
static std::vector<std::pair<const char *, size_t>> tensors;
static std::vector<Fiber> fibers;
static std::vector<std::unique_ptr<char[]>> stacks;  // of all blocks, one after another
static ucontext_t scheduler;
static jmp_buf scheduler_place;
static int current, warps;
static std::vector<u8> shared_bytes;
static std::vector<Word> words;
static std::map<u32, Bar> bars;
static std::vector<Meeting> meetings;
static std::vector<Exchange> exchanges;

inline void report(const std::string &text) {
  if (problem.empty())
    problem = text + " (block " + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
              ", thread " + std::to_string(current) + ")";
}

// Give way until a condition holds; the scheduler asks for it
inline void wait_for(std::function<bool()> ready) {
  if (ready()) return;
  Fiber &me = fibers[current];
  me.ready = std::move(ready);
  if (!_setjmp(me.place)) _longjmp(scheduler_place, 1);
}

inline void join(std::vector<int> &into, const std::vector<int> &from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// Let `count` threads meet: what each did before is seen by all after
inline void meet(int place, int count, bool orders_memory = true) {
  Meeting &here = meetings[place];
  Fiber &me = fibers[current];
  const long round = here.round;
  if (orders_memory) join(here.clock, me.clock);
  if (++here.arrived == count) {
    here.arrived = 0, ++here.round;
    here.left = here.clock;
    here.clock.clear();
  } else {
    wait_for([&here, round] { return here.round > round; });
  }
  if (orders_memory) {
    join(me.clock, here.left);
    ++me.clock[current];
  }
}

inline void touch(u32 at, int size, bool writes) {
  if (at + size > shared_bytes.size()) return report("shared memory is exceeded at " + std::to_string(at));
  if (at % std::min(size, 16)) report("an access to shared memory is not aligned");
  const std::vector<int> &clock = fibers[current].clock;
  for (u32 i = at / 4; i < (at + size) / 4; ++i) {
    Word &word = words[i];
    if (word.writer >= 0 && word.writer != current && clock[word.writer] < word.written)
      report("no barrier between a write by thread " + std::to_string(word.writer) + " and an access to byte " + std::to_string(4 * i));
    if (writes) {
      for (auto [reader, when] : word.readers)
        if (reader != current && clock[reader] < when)
          report("no barrier between a read by thread " + std::to_string(reader) + " and a write to byte " + std::to_string(4 * i));
      word.readers.clear();
      word.writer = current, word.written = clock[current];
    } else {
      word.readers[current] = clock[current];
    }
  }
}

inline void check(const void *at, int size) {
  const char *p = (const char *)at;
  if ((uintptr_t)p % size) report("an access to global memory is not aligned");
  for (auto [begin, bytes] : tensors)
    if (p >= begin && p + size <= begin + bytes) return;
  report("an access to global memory lies outside of all tensors");
}

template <typename Value> Value load(const void *at) {
  check(at, sizeof(Value));
  Value v{};
  if (problem.empty()) memcpy(&v, at, sizeof(Value));
  return v;
}
template <typename Value> void store(void *at, Value v) {
  check(at, sizeof(Value));
  if (problem.empty()) memcpy(at, &v, sizeof(Value));
}

inline void finish(const Copy &copy) {
  touch(copy.to, copy.size, true);
  check(copy.from, std::min(copy.size, 16));
  if (problem.empty()) memcpy(&shared_bytes[copy.to], copy.from, copy.size);
}

inline float half_to_float(u16 v) {
  const int exponent = v >> 10 & 31, digits = v & 1023;
  const float size = exponent == 31  ? (digits ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp((float)digits, -24)
                                     : std::ldexp((float)(digits + 1024), exponent - 25);
  return v >> 15 ? -size : size;
}
inline u16 float_to_half(float v) {  // to the nearest, of two to the even one
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  const float size = std::fabs(v);
  if (std::isnan(v)) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  const int exponent = std::max(size > 0 ? std::ilogb(size) : -15, -14);
  const u32 digits = (u32)std::nearbyint(std::ldexp(size, 10 - exponent));  // 2048 carries over
  return sign | (u16)(digits < 1024 ? digits : ((u32)(exponent + 15) << 10) + digits - 1024);
}
inline u16 float_to_bf16(float v) {
  u32 bits = __float_as_uint(v);
  if (std::isnan(v)) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static std::function<void()> body;
inline void run_fiber() {
  body();
  fibers[current].done = true;
  _longjmp(scheduler_place, 1);
}

inline void go_on(Fiber &fiber) {
  if (_setjmp(scheduler_place)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  swapcontext(&scheduler, &fiber.context);
}

inline void run_block(int threads) {
  fibers.clear();
  fibers.resize(threads);
  while ((int)stacks.size() < threads) stacks.emplace_back(new char[STACK]);
  warps = (threads + LANES - 1) / LANES;
  words.assign(shared_bytes.size() / 4, Word());
  std::fill(shared_bytes.begin(), shared_bytes.end(), 0xff);  // NaN: nothing is zero by chance
  bars.clear();
  meetings.assign(1 + warps + 16, Meeting());
  exchanges.assign(warps, Exchange());
  for (int i = 0; i < threads; ++i) {
    fibers[i].clock.assign(threads, 0);
    fibers[i].clock[i] = 1;
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = stacks[i].get();
    fibers[i].context.uc_stack.ss_size = STACK;
    fibers[i].context.uc_link = &scheduler;
    makecontext(&fibers[i].context, run_fiber, 0);
  }
  for (bool any = true, moved = true; any && moved;) {
    any = moved = false;
    for (int i = 0; i < threads; ++i) {
      Fiber &fiber = fibers[i];
      if (fiber.done) continue;
      any = true;
      if (fiber.ready && !fiber.ready()) continue;
      fiber.ready = nullptr;
      moved = true;
      current = i;
      threadIdx = {(unsigned)i, 0, 0};
      go_on(fiber);
    }
    if (any && !moved) report("threads wait for each other");
  }
}

inline void launch(unsigned x, unsigned y, int threads, size_t shared, std::function<void()> kernel) {
  if (!problem.empty()) return;
  if (shared > SHARED) return report("more shared memory than a GPU has");
  shared_bytes.resize(shared);
  body = std::move(kernel);
  blockDim = {(unsigned)threads, 1, 1};
  gridDim = {x, y, 1};
  for (unsigned b = 0; b < y; ++b)
    for (unsigned a = 0; a < x && problem.empty(); ++a) {
      blockIdx = {a, b, 0};
      run_block(threads);
    }
}

}  // namespace emulator

inline u32 pack_half(float lo, float hi) {
  return emulator::float_to_half(lo) | (u32)emulator::float_to_half(hi) << 16;
}
inline float low_half(u32 v) { return emulator::half_to_float((u16)v); }
inline float high_half(u32 v) { return emulator::half_to_float((u16)(v >> 16)); }
#if BF16
inline u32 pack(float lo, float hi) {
  return emulator::float_to_bf16(lo) | (u32)emulator::float_to_bf16(hi) << 16;
}
inline float low(u32 v) { return __uint_as_float(v << 16); }
inline float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
#else
inline u32 pack(float lo, float hi) { return pack_half(lo, hi); }
inline float low(u32 v) { return low_half(v); }
inline float high(u32 v) { return high_half(v); }
#endif
inline float tanh_fast(float v) { return std::tanh(v); }

inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  using namespace emulator;
  const int lane = current % LANES;
  Exchange &all = exchanges[current / LANES];
  const long round = all.round;
  memcpy(all.a[lane], a, 16), memcpy(all.d[lane], d, 16);
  all.b[lane][0] = b0, all.b[lane][1] = b1;
  if (++all.arrived == LANES) {
    float A[16][16], B[16][8];
    for (int t = 0; t < LANES; ++t) {
      const int g = t / 4, q = t % 4;
      for (int k = 0; k < 2; ++k) {
        auto of = [k](u32 v) { return k ? high(v) : low(v); };
        A[g][2 * q + k] = of(all.a[t][0]), A[g + 8][2 * q + k] = of(all.a[t][1]);
        A[g][2 * q + 8 + k] = of(all.a[t][2]), A[g + 8][2 * q + 8 + k] = of(all.a[t][3]);
        B[2 * q + k][g] = of(all.b[t][0]), B[2 * q + 8 + k][g] = of(all.b[t][1]);
      }
    }
    for (int t = 0; t < LANES; ++t)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) all.d[t][i] += A[t / 4 + i / 2 * 8][k] * B[k][t % 4 * 2 + i % 2];
    all.arrived = 0, ++all.round;
  } else {
    wait_for([&all, round] { return all.round > round; });
  }
  memcpy(d, all.d[lane], 16);
}

inline int keep(int v) { return v; }

inline u32 load_2(const void *at) { return emulator::load<u16>(at); }
inline u32 load_4(const void *at) { return emulator::load<u32>(at); }
inline uint2 load_8(const void *at) { return emulator::load<uint2>(at); }
inline uint4 load_16(const void *at) { return emulator::load<uint4>(at); }
inline float load_float(const float *at) { return emulator::load<float>(at); }
inline void store_2(void *at, u32 v) { emulator::store<u16>(at, (u16)v); }
inline void store_4(void *at, u32 v) { emulator::store<u32>(at, v); }
inline void store_8(void *at, uint2 v) { emulator::store<uint2>(at, v); }
inline void store_16(void *at, uint4 v) { emulator::store<uint4>(at, v); }

inline u32 get_shared_base() { return 0; }
template <typename Value> Value read_shared(u32 at) {
  Value v{};
  emulator::touch(at, sizeof(Value), false);
  if (emulator::problem.empty()) memcpy(&v, &emulator::shared_bytes[at], sizeof(Value));
  return v;
}
template <typename Value> void write_shared(u32 at, Value v) {
  emulator::touch(at, sizeof(Value), true);
  if (emulator::problem.empty()) memcpy(&emulator::shared_bytes[at], &v, sizeof(Value));
}
inline uint4 read_16(u32 at) { return read_shared<uint4>(at); }
inline u32 read_4(u32 at) { return read_shared<u32>(at); }
inline void write_4(u32 at, u32 v) { write_shared(at, v); }
inline void write_16(u32 at, uint4 v) { write_shared(at, v); }

template <int SIZE> void copy(u32 to, const void *from) {
  const emulator::Copy wanted{to, from, SIZE};
#ifdef EARLY_COPIES
  emulator::finish(wanted);
#else
  emulator::fibers[emulator::current].open.push_back(wanted);
#endif
}
inline void end_copies() {
  auto &me = emulator::fibers[emulator::current];
  me.groups.push_back(std::move(me.open));
  me.open.clear();
}
template <int MORE> void await_copies() {
  auto &groups = emulator::fibers[emulator::current].groups;
  for (; groups.size() > MORE; groups.pop_front())
    for (const auto &copy : groups.front()) emulator::finish(copy);
}

#if BULK
inline void start_bulk_barrier(u32 bar, int arrivals) {
  emulator::touch(bar, 8, true);
  emulator::bars[bar].needed = arrivals;
}
inline void complete(emulator::Bar &bar) {  // what arrives belongs to the thread that asked for it
  if (bar.arrived < bar.needed || bar.bytes) return;
  bar.arrived = 0, ++bar.phase;
}
inline void expect_bytes(u32 at, int bytes) {
  emulator::Bar &bar = emulator::bars.at(at);
  auto &me = emulator::fibers[emulator::current];
  ++bar.arrived, bar.bytes += bytes;
  emulator::join(bar.clock, me.clock);
  ++me.clock[emulator::current];
  complete(bar);
}
inline void copy_bulk(u32 to, const void *from, int bytes, u32 at) {
  emulator::Bar &bar = emulator::bars.at(at);
  auto &me = emulator::fibers[emulator::current];
  if (bytes % 16 || to % 16) emulator::report("a bulk copy is not aligned");
  for (int i = 0; i < bytes; i += 16) emulator::finish({to + i, (const char *)from + i, 16});
  bar.bytes -= bytes;
  emulator::join(bar.clock, me.clock);
  ++me.clock[emulator::current];
  complete(bar);
}
inline void await_bulk(u32 at, int parity) {
  emulator::Bar &bar = emulator::bars.at(at);
  emulator::wait_for([&bar, parity] { return (bar.phase & 1) != parity; });
  emulator::join(emulator::fibers[emulator::current].clock, bar.clock);
}
#endif

inline void await_block() { emulator::meet(0, blockDim.x); }
inline void await_warp() { emulator::meet(1 + emulator::current / emulator::LANES, emulator::LANES); }
inline void await_neighbour(int warp) { emulator::meet(1 + emulator::warps + warp / 2, 64); }
