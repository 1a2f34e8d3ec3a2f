// LSTM and GRU layers: all time steps in one kernel, for a lane and a direction of some windows.
//
// Shapes and slots as in `kernels/rnn`: K lanes, W directions, T steps, B windows, D inputs, H units
// (a multiple of 16; `pack` pads with units of zero weights).
//
// A step is the product of the recurrent weights and h, then the gates. A block owns NW windows of
// one lane and direction; a warp owns 16 units with all their slots and keeps their weights in
// registers for all steps. The product is slots^T [4 H x windows] = U [4 H x H] h^T [H x windows]:
// weights are operand A of the warp's matrix instruction, so 8 windows fill its 8 columns. Rows of U
// are ordered so that the thread that gets one slot of a unit gets the others too: thread (g, q) =
// (lane / 4, lane % 4) owns units 16 warp + 2 g + {0, 1} and windows 2 q + {0, 1}, and their states in
// registers, in both passes. Only h (backward: the slots' gradients) goes through shared memory, in
// two buffers, with one barrier a step. Columns of U are ordered so that operand B of two
// instructions is one read of 16 bytes.
//
// NW = 4 halves everything but the product: a thread owns one window, q. Columns 2 n and 2 n + 1 of
// operand B then hold window n at two places of its row, each of which is right for one of two
// instructions, with sums of their own: a read serves four instructions.
//
//     source    KX > 0: inputs in blocks of 16 columns, [K, T, B, 16 KX], which an instruction each
//               multiplies by w_ih; with ONES, two columns after them are ones and carry the biases
//               as a high and a low part. KX = 0: the products of x and w_ih, [K, T, B, W, H, 4]
//     y         [K, T, B, W, H]    outputs
//     slots     [K, T, B, W, H, 4] saved, in fp16; `backward` writes the slots' gradients over it
//               LSTM: tanh of half of i, half of f, g, half of o; GRU: the new gate, tanh of half of r
//               and half of z, and the new gate's part from h
//     cells     [K, T, B, W, H]    of an LSTM, in fp16
//     last      [K, B, W, H]       LAST: each direction's last output, in fp32
//     h0, c0    [K, W, B, H]       STATES: initial states, in fp32; after_h, after_c: final ones
//     dy        [K, T, B, W, H], or LAST: [K, B, W, H] in fp32
//     dh0, dc0  [K, W, B, H]       STATES: the gradients of the initial states, in fp32
//
// y, dy, source and gradients are of the operands' type: fp16 or BF16. Grid: (blocks, K W), 2 H
// threads; `rnn.py` has the bytes of shared memory. A launch begins at window `begin`, so that a pass
// may be several launches with different NW. The steps of a direction run from its first.

#ifndef KERNEL
#define KERNEL 0  // compile 1: pack_layer, 2: rnn_forward, 3: rnn_backward, 0: all
#endif
#ifndef GRU
#define GRU 0
#endif
#ifndef H
#define H 128
#endif
#ifndef W
#define W 1
#endif
#ifndef NW
#define NW 4  // windows of a block: 4, 8 or 16
#endif
#ifndef KX
#define KX 1
#endif
#ifndef ONES
#define ONES (KX > 0)
#endif
#ifndef LAST
#define LAST 0
#endif
#ifndef SAVE
#define SAVE 1
#endif
#ifndef STATES
#define STATES 0
#endif
#ifndef BF16
#define BF16 0
#endif
#ifndef AHEAD
#define AHEAD 4  // steps by which memory is read ahead, 2 at least
#endif
#ifndef BULK
#define BULK 0  // `backward` reads memory by bulk copies
#endif

constexpr int WARPS = H / 16, THREADS = 32 * WARPS;
constexpr int BLOCKS = (H + 31) / 32;  // of 32 columns of U: two instructions each
constexpr int TILES = GRU ? 3 : 4;     // of 16 rows of U for 16 units
constexpr int GATES = GRU ? 3 : 4;
constexpr int NT = (NW + 7) / 8;              // groups of 8 columns
constexpr int E = NW == 4 ? 1 : 2;            // a thread's windows in each of them
constexpr int SETS = NT * E;                  // a thread's windows
constexpr int ROWS = 4 * E;                   // of operand B in shared memory, for 8 columns
constexpr int PAD = E == 1 ? 32 : 128;        // bytes between them, so that reads meet every bank
constexpr int LOADS = 4 / E;                  // instructions that one read of operand B serves
constexpr int READS = (2 * BLOCKS + LOADS - 1) / LOADS;  // of operand B in `forward`
constexpr int KSPLIT = H % 32 ? 1 : 2;  // 2: two warps of `backward` share 32 units, half of the
                                        // product each, and exchange sums
constexpr int STEPS = H / 4 / KSPLIT;   // instructions of `backward` for 16 units and 8 columns

// A thread's set i is this window, counted from its first
#define WINDOW(i) ((i) / E * 8 + (i) % E)

// Row r = 0 or 1 (g or g + 8) of a tile: its slot, and which of the thread's two units
constexpr DEVICE int slot_of(int tile, int r) {
  return GRU ? (tile < 2 ? 1 + r : tile == 2 ? 3 : 0) : 2 * (tile & 1) + r;
}
constexpr DEVICE int unit_of(int tile, int r) { return GRU ? (tile < 2 ? tile : r) : tile >> 1; }
// Sigmoids are computed as tanh(v / 2) / 2 + 1 / 2, with v / 2 from halved weights
constexpr DEVICE bool is_halved(int slot) { return GRU ? slot == 1 || slot == 2 : slot != 2; }

// Where a window's row of operand B begins, and where thread (g, q) reads its column
template <int ROW> DEVICE int row_at(int n) {
  return E == 1 ? n / 2 * ROW : n * ROW + (((n >> 1) * 32 + (n & 1) * 64) & 127);
}
template <int ROW> DEVICE int column_at(int g, int q) {
  return row_at<ROW>(g) + 16 * q + (E == 1 ? g % 2 * 64 : 0);
}

DEVICE void zero_shared(u32 at, int bytes) {
  for (int i = 4 * threadIdx.x; i < bytes; i += 4 * THREADS) write_4(at + i, 0);
}

// ---------------------------------------------------------------------------------------------------
// pack: weights in the order in which threads read them, and x as `forward` reads it
//
//     forward_u   [K W, WARPS, 2 BLOCKS, TILES, 32] x 16 bytes
//     forward_v   [K W, WARPS, KX, 4, 32] x 16 bytes
//     bias        [K W, H, 4] fp32, halved for sigmoids (without ONES)
//     by_slot     [K, W H 4, D], which makes the products of x and its gradient; may be null
//     backward_u  [K W, WARPS, H / 4, 32] x 16 bytes (SAVE)
//     packed_x    [K, T B, 16 KX]; null where x is read as it is
//
// The weights are fp32, of `units` units in PyTorch's order of gates; X_TYPE: 0 fp32, 1 fp16, 2 bf16.

#ifndef X_TYPE
#define X_TYPE 0
#endif

struct Weights {
  const float *ih, *hh, *b_ih, *b_hh;
  i64 ih_lane, hh_lane, b_ih_lane, b_hh_lane;  // elements from one lane's to the next one's
  int units, inputs;
};

DEVICE int gate_of(int slot, bool from_h) {  // -1: the slot has no such part
  if (!GRU) return slot;
  if (slot == 0) return from_h ? -1 : 2;
  if (slot == 3) return from_h ? 2 : -1;
  return slot - 1;
}

DEVICE float weight_of_h(const Weights &w, int who, int slot, int unit, int from) {
  const int gate = gate_of(slot, true);
  if (gate < 0 || unit >= w.units || from >= w.units) return 0.f;
  const i64 row = (i64)(who % W) * GATES * w.units + gate * w.units + unit;
  return load_float(w.hh + who / W * w.hh_lane + row * w.units + from);
}

DEVICE float weight_of_x(const Weights &w, int who, int slot, int unit, int from) {
  const int gate = gate_of(slot, false);
  if (gate < 0 || unit >= w.units || from >= w.inputs) return 0.f;
  const i64 row = (i64)(who % W) * GATES * w.units + gate * w.units + unit;
  return load_float(w.ih + who / W * w.ih_lane + row * w.inputs + from);
}

DEVICE float bias_of(const Weights &w, int who, int slot, int unit) {
  if (unit >= w.units) return 0.f;
  const int from_x = gate_of(slot, false), from_h = gate_of(slot, true);
  const int at = who % W * GATES * w.units + unit;
  float sum = 0.f;
  if (from_x >= 0) sum += load_float(w.b_ih + who / W * w.b_ih_lane + at + from_x * w.units);
  if (from_h >= 0) sum += load_float(w.b_hh + who / W * w.b_hh_lane + at + from_h * w.units);
  return sum;
}

DEVICE float load_x(const void *x, i64 at) {
#if X_TYPE == 0
  return load_float((const float *)x + at);
#else
  const u32 v = load_2((const u16 *)x + at);
  return X_TYPE == 1 ? low_half(v) : __uint_as_float(v << 16);
#endif
}

#if KERNEL == 0 || KERNEL == 1
GLOBAL(256) pack_layer(Weights w, const void *x, uint4 *forward_u, uint4 *forward_v, float *bias,
                       u16 *by_slot, uint4 *backward_u, u16 *packed_x, int lanes, i64 rows) {
  const int recurrences = lanes * W;
  const i64 end_u = (i64)recurrences * WARPS * 2 * BLOCKS * TILES * 32;
  const i64 end_v = end_u + (i64)recurrences * WARPS * KX * 4 * 32;
  const i64 end_bias = end_v + (ONES ? 0 : (i64)recurrences * H * 4);
  const i64 end_slot = end_bias + (by_slot ? (i64)recurrences * H * 4 * w.inputs : 0);
  const i64 end_b = end_slot + (SAVE ? (i64)recurrences * WARPS * (H / 4) * 32 : 0);
  const i64 end_x = end_b + (packed_x ? rows * KX : 0);
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < end_x; i += (i64)gridDim.x * blockDim.x) {
    const int lane = i % 32, g = lane / 4, q = lane % 4;
    u32 v[4];
    if (i < end_u) {
      i64 n = i / 32;
      const int tile = n % TILES, k = n / TILES % (2 * BLOCKS), warp = n / (TILES * 2 * BLOCKS) % WARPS;
      const int who = n / (TILES * 2 * BLOCKS * WARPS);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int r = part % 2, slot = slot_of(tile, r), unit = 16 * warp + 2 * g + unit_of(tile, r);
        const int from = 32 * (k / 2) + 8 * q + 4 * (k % 2) + 2 * (part / 2);
        const float scale = is_halved(slot) ? .5f : 1.f;
        v[part] = pack(scale * weight_of_h(w, who, slot, unit, from),
                       scale * weight_of_h(w, who, slot, unit, from + 1));
      }
      store_16(forward_u + i, make_uint4(v[0], v[1], v[2], v[3]));
    } else if (KX && i < end_v) {
      constexpr int BY_WARP = KX ? 4 * KX : 1;
      const i64 n = (i - end_u) / 32;
      const int tile = n % 4, block = n / 4 % (KX ? KX : 1), warp = n / BY_WARP % WARPS;
      const int who = n / (BY_WARP * WARPS);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int r = part % 2, slot = slot_of(tile, r), unit = 16 * warp + 2 * g + unit_of(tile, r);
        const float scale = is_halved(slot) ? .5f : 1.f;
        const float sum = scale * bias_of(w, who, slot, unit), rounded = low(pack(sum, 0.f));
        float pair[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int from = 16 * block + 4 * q + 2 * (part / 2) + k;
          pair[k] = scale * weight_of_x(w, who, slot, unit, from);
          if (ONES && from == w.inputs) pair[k] = rounded;
          if (ONES && from == w.inputs + 1) pair[k] = sum - rounded;
        }
        v[part] = pack(pair[0], pair[1]);
      }
      store_16(forward_v + (i - end_u), make_uint4(v[0], v[1], v[2], v[3]));
    } else if (i < end_bias) {
      const i64 n = i - end_v;
      const int slot = n % 4, unit = n / 4 % H, who = n / (4 * H);
      const float scale = is_halved(slot) ? .5f : 1.f;
      store_4(bias + n, __float_as_uint(scale * bias_of(w, who, slot, unit)));
    } else if (i < end_slot) {
      const i64 n = i - end_bias;
      const int from = n % w.inputs;
      const i64 row = n / w.inputs;
      const int slot = row % 4, unit = row / 4 % H, who = row / (4 * H);
      store_2(by_slot + n, pack(weight_of_x(w, who, slot, unit, from), 0.f));
    } else if (i < end_b) {
      const i64 n = (i - end_slot) / 32;
      const int s = n % (H / 4), warp = n / (H / 4) % WARPS, who = n / (H / 4 * WARPS);
      const int unit = 8 * (s / 2) + 2 * q + s % 2, to = 16 * warp + 2 * g;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int slot = part / 2 * 2;
        v[part] = pack(weight_of_h(w, who, slot, unit, to + part % 2),
                       weight_of_h(w, who, slot + 1, unit, to + part % 2));
      }
      store_16(backward_u + (i - end_slot), make_uint4(v[0], v[1], v[2], v[3]));
    } else {
      // 16 columns at once: with fewer, a thread waits for memory as often for less
      const i64 n = i - end_b, row = n / (KX ? KX : 1);
      float c[16];
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const int from = n % (KX ? KX : 1) * 16 + k;
        const bool is_one = ONES && from >= w.inputs && from < w.inputs + 2;
        c[k] = from < w.inputs ? load_x(x, row * w.inputs + from) : is_one ? 1.f : 0.f;
      }
#pragma unroll
      for (int k = 0; k < 16; k += 8)
        store_16(packed_x + 16 * n + k, make_uint4(pack(c[k], c[k + 1]), pack(c[k + 2], c[k + 3]),
                                                   pack(c[k + 4], c[k + 5]), pack(c[k + 6], c[k + 7])));
    }
  }
}
#endif

// ---------------------------------------------------------------------------------------------------
// forward

#if KERNEL == 0 || KERNEL == 2
GLOBAL(THREADS) rnn_forward(const u16 *__restrict__ source, const uint4 *__restrict__ forward_u,
                            const uint4 *__restrict__ forward_v, const float *__restrict__ bias,
                            const float *__restrict__ h0, const float *__restrict__ c0,
                            u16 *__restrict__ y, u16 *__restrict__ slots, u16 *__restrict__ cells,
                            float *__restrict__ last, float *__restrict__ after_h,
                            float *__restrict__ after_c, int T, int B, int begin) {
  constexpr int ROW = 32 * LOADS * READS + PAD, GROUP = ROWS * ROW, BUFFER = NT * GROUP;
  constexpr int STAGE = SETS * THREADS * 16;  // products of one step, after both buffers (no KX)
  constexpr int AT = W * H;                   // elements from a window to the next one
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const int who = blockIdx.y, direction = who % W;
  const i64 model = who / W;
  const int unit = 16 * warp + 2 * g;

  u32 U[TILES][2 * BLOCKS][4], V[KX ? KX : 1][4][4];
  float offset[4][2];
  const uint4 *u_at = forward_u + ((i64)who * WARPS + warp) * 2 * BLOCKS * TILES * 32 + lane;
#pragma unroll
  for (int k = 0; k < 2 * BLOCKS; ++k)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 v = load_16(u_at + (k * TILES + tile) * 32);
      U[tile][k][0] = v.x, U[tile][k][1] = v.y, U[tile][k][2] = v.z, U[tile][k][3] = v.w;
    }
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    const uint4 *v_at = forward_v + ((i64)who * WARPS + warp) * KX * 4 * 32 + lane;
#pragma unroll
    for (int b = 0; b < KX; ++b) {
      const uint4 v = load_16(v_at + (b * 4 + tile) * 32);
      V[b][tile][0] = v.x, V[b][tile][1] = v.y, V[b][tile][2] = v.z, V[b][tile][3] = v.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 of = ((i64)who * H + unit + unit_of(tile, r)) * 4 + slot_of(tile, r);
      offset[tile][r] = ONES ? 0.f : load_float(bias + of);
    }
  }

  const u32 base = get_shared_base();
  const u32 read_at = keep(base + column_at<ROW>(g, q));
  const u32 write_at = keep(base + row_at<ROW>(2 * q) + 2 * unit);
  const u32 other_at = keep(base + row_at<ROW>(2 * q + 1) + 2 * unit);
  const int window = begin + blockIdx.x * NW + E * q, left = keep(B - window);
  const i64 step = direction ? -1 : 1, stride = step * B * AT;
  const int first = direction ? T - 1 : 0;
  const i64 start = (model * T + first) * B * AT + direction * H + unit + (i64)window * AT;
  u16 *y_at = y + start - stride, *s_at = slots + 4 * (start - stride);  // of the step before
  u16 *c_at = cells + start - stride;
  const i64 state_at = ((i64)who * B + window) * H + unit;

  float state[SETS][2];  // LSTM: c, GRU: h
  u32 hs[SETS], cs[SETS];  // what a step stores of its thread's windows: h, cells, slots
  uint4 ss[SETS];
#pragma unroll
  for (int i = 0; i < SETS; ++i) {
    state[i][0] = state[i][1] = 0.f, hs[i] = cs[i] = 0;
    ss[i] = make_uint4(0, 0, 0, 0);
  }
  zero_shared(base, 2 * BUFFER);
#if STATES
  await_block();
#pragma unroll
  for (int i = 0; i < SETS; ++i)
    if (WINDOW(i) < left) {
      const float *h_at = h0 + state_at + WINDOW(i) * H, *of = GRU ? h_at : c0 + state_at + WINDOW(i) * H;
      state[i][0] = load_float(of), state[i][1] = load_float(of + 1);
      write_4((i % E ? other_at : write_at) + BUFFER + i / E * GROUP,
              pack(load_float(h_at), load_float(h_at + 1)));
    }
#endif

  uint2 X[2][NT][KX ? KX : 1];  // inputs of this thread's column of operand B
  const int column = begin + blockIdx.x * NW + (E == 2 ? g : g / 2), columns_left = keep(B - column);
  i64 x_at = ((model * T + first) * B + column) * 16 * KX + 4 * q, p_at = 4 * start;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int b = 0; b < KX; ++b) X[0][nt][b] = X[1][nt][b] = make_uint2(0, 0);
  const u32 stages = keep(base + 2 * BUFFER + 16 * threadIdx.x);
  u32 to_stage = 0, of_stage = 0;
  auto next = [](u32 stage) { return stage + STAGE == AHEAD * STAGE ? 0 : stage + STAGE; };
  auto read_x = [&](int set, bool more) {  // of the next step that was not read, if there is one
    if (KX) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int b = 0; b < KX; ++b)
          if (more && 8 * nt < columns_left)
            X[set][nt][b] = load_8(source + x_at + 8 * nt * 16 * KX + 16 * b);
      x_at += step * B * 16 * KX;
    } else {
#pragma unroll
      for (int i = 0; i < SETS; ++i)
        if (more && WINDOW(i) < left)
          copy<16>(stages + to_stage + i * THREADS * 16, source + p_at + 4 * WINDOW(i) * AT);
      end_copies();
      p_at += 4 * stride;
      to_stage = next(to_stage);
    }
  };

  float sums[NT][4][3 - E][4];
  auto start_sums = [&](int set) {  // of a step: its products with x
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      uint4 v[E];
      if (!KX)
#pragma unroll
        for (int e = 0; e < E; ++e) v[e] = read_16(stages + of_stage + (nt * E + e) * THREADS * 16);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float(&a)[4] = sums[nt][tile][0];
        a[0] = a[1] = offset[tile][0], a[2] = a[3] = offset[tile][1];
        if (E == 1)
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[nt][tile][2 - E][k] = E == 1 ? 0.f : a[k];
#pragma unroll
        for (int b = 0; b < KX; ++b) multiply(a, V[b][tile], X[set][nt][b].x, X[set][nt][b].y);
        if (!KX) {
#pragma unroll
          for (int e = 0; e < E; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int slot = slot_of(tile, r), second = unit_of(tile, r);
              const u32 early = second ? v[e].z : v[e].x, late = second ? v[e].w : v[e].y;
              const u32 pair = slot < 2 ? early : late;
              const float of_x = slot % 2 ? high(pair) : low(pair);
              if (gate_of(slot, false) >= 0) a[2 * r + e] += (is_halved(slot) ? .5f : 1.f) * of_x;
            }
        }
      }
    }
    if (!KX) of_stage = next(of_stage);
  };

  auto store = [&](bool any) {
#pragma unroll
    for (int i = 0; i < SETS; ++i)
      if (any && WINDOW(i) < left) {
        if (SAVE || !LAST) store_4(y_at + WINDOW(i) * AT, hs[i]);
        if (SAVE) store_16(s_at + 4 * WINDOW(i) * AT, ss[i]);
        if (SAVE && !GRU) store_4(c_at + WINDOW(i) * AT, cs[i]);
      }
  };

  if (KX) {
    read_x(0, true), read_x(1, T > 1);
  } else {
    for (int k = 0; k < AHEAD; ++k) read_x(0, k < T);
    await_copies<AHEAD - 1>();
  }
  start_sums(0);
  await_block();

  for (int t0 = 0; t0 < T; t0 += 2)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int t = t0 + u;
      if (u && t >= T) break;
      uint4 v[READS][NT];
#pragma unroll
      for (int b = 0; b < READS; ++b)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          v[b][nt] = read_16(read_at + (u ^ 1) * BUFFER + nt * GROUP + 32 * LOADS * b);
#pragma unroll
      for (int b = 0; b < READS; ++b) {
        if (b == READS / 2) {  // what is not in the chain of steps
          store(t > 0);
          read_x(u, KX ? t + 2 < T : t + AHEAD < T);
          await_warp();
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int k = 0; k < LOADS; ++k)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
              if (LOADS * b + k < 2 * BLOCKS)
                multiply(sums[nt][tile][E == 1 ? k / 2 : 0], U[tile][LOADS * b + k],
                         k % 2 ? v[b][nt].z : v[b][nt].x, k % 2 ? v[b][nt].w : v[b][nt].y);
      }
#pragma unroll
      for (int i = 0; i < SETS; ++i) {
        const int nt = i / E, e = i % E;
        float h[2];
        u32 s[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          auto sum = [&](int slot) {
            const int tile = GRU ? (slot == 0 ? 3 : slot == 3 ? 2 : j) : 2 * j + slot / 2;
            const int r = GRU ? (slot == 0 || slot == 3 ? j : slot - 1) : slot % 2;
            const float own = sums[nt][tile][0][2 * r + e];
            return E == 2 || tile >= TILES ? own : own + sums[nt][tile][2 - E][2 * r + 1];
          };
          const float before = state[i][j];
          if (GRU) {
            const float tr = tanh_fast(sum(1)), tz = tanh_fast(sum(2)), from_h = sum(3);
            const float n = tanh_fast(sum(0) + (.5f * tr + .5f) * from_h);
            h[j] = state[i][j] = n + (.5f * tz + .5f) * (before - n);
            s[j][0] = pack_half(n, tr), s[j][1] = pack_half(tz, from_h);
          } else {
            const float ti = tanh_fast(sum(0)), tf = tanh_fast(sum(1));
            const float z = tanh_fast(sum(2)), to = tanh_fast(sum(3));
            state[i][j] = (.5f * tf + .5f) * before + (.5f * ti + .5f) * z;
            h[j] = (.5f * to + .5f) * tanh_fast(state[i][j]);
            s[j][0] = pack_half(ti, tf), s[j][1] = pack_half(z, to);
          }
        }
        if (!GRU) cs[i] = pack_half(state[i][0], state[i][1]);
        hs[i] = pack(h[0], h[1]);
        write_4((e ? other_at : write_at) + u * BUFFER + nt * GROUP, hs[i]);
        ss[i] = make_uint4(s[0][0], s[0][1], s[1][0], s[1][1]);
      }
      y_at += stride, s_at += 4 * stride, c_at += stride;
      if (!KX) await_copies<AHEAD - 1>();
      start_sums(u ^ 1);
      await_block();
    }
  store(true);

#if LAST || STATES
#pragma unroll
  for (int i = 0; i < SETS; ++i)
    if (WINDOW(i) < left)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 h = __float_as_uint(j ? high(hs[i]) : low(hs[i]));
        const i64 at = (model * B + window + WINDOW(i)) * AT + direction * H + unit + j;
        if (LAST) store_4(last + at, h);
        if (STATES) store_4(after_h + state_at + WINDOW(i) * H + j, h);
        if (STATES && !GRU) store_4(after_c + state_at + WINDOW(i) * H + j, __float_as_uint(state[i][j]));
      }
#endif
}
#endif

// ---------------------------------------------------------------------------------------------------
// backward: dh^T [H x windows] = U^T [H x 4 H] d^T [4 H x windows], columns of U^T = (unit, slot)
//
// Rows g and g + 8 of a warp's tile are units 2 g and 2 g + 1 of its 16. Instruction s multiplies all
// slots of unit 8 (s / 2) + 2 q + s % 2. `carry` is the array of the states: LSTM `cells`, GRU `y`.

#if KERNEL == 0 || KERNEL == 3
GLOBAL(THREADS) rnn_backward(u16 *slots, const u16 *__restrict__ carry,
                             const uint4 *__restrict__ backward_u, const void *__restrict__ dy,
                             const float *__restrict__ h0, const float *__restrict__ c0,
                             float *__restrict__ dh0, float *__restrict__ dc0, int T, int B,
                             int begin) {
  constexpr int ROW = 8 * H + PAD, GROUP = ROWS * ROW, BUFFER = NT * GROUP;
  constexpr int AT = W * H;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const int who = blockIdx.y, direction = who % W;
  const i64 model = who / W;
  const int unit = 16 * warp + 2 * g;

  // KSPLIT = 2: a warp has its own units' rows and its neighbour's, for half of the columns
  u32 U[KSPLIT][STEPS][4];
  const int part = KSPLIT == 2 ? warp % 2 : 0;
#pragma unroll
  for (int m = 0; m < KSPLIT; ++m)  // 0: its own
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const i64 row = ((i64)who * WARPS + (warp ^ m)) * (H / 4) + part * STEPS + s;
      const uint4 v = load_16(backward_u + row * 32 + lane);
      U[m][s][0] = v.x, U[m][s][1] = v.y, U[m][s][2] = v.z, U[m][s][3] = v.w;
    }

  const u32 base = get_shared_base();
  const u32 read_at = keep(base + column_at<ROW>(g, q) + part * STEPS * 32);
  const u32 write_at = keep(base + row_at<ROW>(2 * q) + 8 * unit);
  const u32 other_at = keep(base + row_at<ROW>(2 * q + 1) + 8 * unit);
  constexpr int EXCHANGE = KSPLIT == 2 ? NT * THREADS * 16 : 0;
  const u32 mine_at = keep(base + 2 * BUFFER + 16 * threadIdx.x);  // sums for the neighbour
  const u32 given_at = keep(base + 2 * BUFFER + 16 * (threadIdx.x ^ 32));
  const int window = begin + blockIdx.x * NW + E * q, left = keep(B - window);
  const int first = direction ? 0 : T - 1;
  const i64 step = direction ? 1 : -1, stride = step * B * AT;
  const i64 origin = (model * T + first) * B * AT + direction * H;
  const i64 start = origin + unit + (i64)window * AT;
  const i64 state_at = ((i64)who * B + window) * H + unit;
  const u16 *dy_half = (const u16 *)dy;
  u16 *d_at = slots + 4 * start;

  // What a step reads, AHEAD steps in shared memory. By thread: slots, carry, dy of its units and
  // windows. In bulk: rows of windows, padded so that their threads' reads meet every bank once.
  constexpr int S_ROW = BULK ? 8 * H + 32 / E : 0, C_ROW = BULK ? 2 * H + 32 / E : 0;
  constexpr int S_SET = THREADS * 16, C_SET = THREADS * 4;
  constexpr int S_SIZE = BULK ? NW * S_ROW : SETS * S_SET, C_SIZE = BULK ? NW * C_ROW : SETS * C_SET;
  constexpr int STAGE = S_SIZE + 2 * C_SIZE;
  const u32 bars = keep(base + 2 * BUFFER + EXCHANGE);
  const u32 fetch_base = bars + (BULK ? 128 : 0);
  u32 s_stage, c_stage, y_stage;
  if (BULK) {
    s_stage = keep(fetch_base + E * q * S_ROW + 8 * unit);
    c_stage = keep(fetch_base + S_SIZE + E * q * C_ROW + 2 * unit);
    y_stage = keep(fetch_base + S_SIZE + C_SIZE + E * q * C_ROW + 2 * unit);
  } else {
    s_stage = keep(fetch_base + 16 * threadIdx.x);
    c_stage = keep(fetch_base + S_SIZE + 4 * threadIdx.x);
    y_stage = keep(fetch_base + S_SIZE + C_SIZE + 4 * threadIdx.x);
  }
  auto s_of = [](int i) { return BULK ? WINDOW(i) * S_ROW : i * S_SET; };
  auto c_of = [](int i) { return BULK ? WINDOW(i) * C_ROW : i * C_SET; };

  u32 to_stage = 0, of_stage = 0;
  auto next = [](u32 stage) { return stage + STAGE == AHEAD * STAGE ? 0 : stage + STAGE; };
#if BULK
  const int row_window = begin + blockIdx.x * NW + warp;  // a warp copies the rows of some windows
  i64 row = origin + (i64)row_window * AT;
  u32 to_bar = 0, of_bar = 0, of_parity = 0;
  auto fetch = [&](bool more) {
    for (int r = warp; r < NW; r += WARPS)
      if (more && lane == 0) {
        const i64 at = row + (i64)(r - warp) * AT;
        const u32 to = fetch_base + to_stage, bar = bars + to_bar;
        const bool is_there = row_window + r - warp < B;
        expect_bytes(bar, is_there ? 8 * H + 2 * H + (LAST ? 0 : 2 * H) : 0);
        if (is_there) {
          copy_bulk(to + r * S_ROW, slots + 4 * at, 8 * H, bar);
          copy_bulk(to + S_SIZE + r * C_ROW, carry + at, 2 * H, bar);
          if (!LAST) copy_bulk(to + S_SIZE + C_SIZE + r * C_ROW, dy_half + at, 2 * H, bar);
        }
      }
    row += stride;
    to_stage = next(to_stage), to_bar = to_bar + 8 == 8 * AHEAD ? 0 : to_bar + 8;
  };
  auto await_next = [&]() {  // the stage after the last that was awaited
    await_bulk(bars + of_bar, of_parity);
    of_parity ^= of_bar + 8 == 8 * AHEAD ? 1 : 0;
    of_bar = of_bar + 8 == 8 * AHEAD ? 0 : of_bar + 8;
  };
#else
  const u16 *s_at = slots + 4 * start, *c_at = carry + start, *dy_at = dy_half + start;
  auto fetch = [&](bool more) {  // what the next step that was not fetched needs
#pragma unroll
    for (int i = 0; i < SETS; ++i)
      if (more && WINDOW(i) < left) {
        copy<16>(s_stage + to_stage + s_of(i), s_at + 4 * WINDOW(i) * AT);
        copy<4>(c_stage + to_stage + c_of(i), c_at + WINDOW(i) * AT);
        if (!LAST) copy<4>(y_stage + to_stage + c_of(i), dy_at + WINDOW(i) * AT);
      }
    end_copies();
    s_at += 4 * stride, c_at += stride, dy_at += stride;
    to_stage = next(to_stage);
  };
#endif

  // The factors of a step: `a` of the slots, by dc (LSTM: i, f, g) or dh; `ac` of dh in dc; `f` of
  // what is passed on, to dc (LSTM) or dh (GRU). `passed` is that.
  float a[SETS][2][4], ac[SETS][2], f[SETS][2], passed[SETS][2], dh[SETS][2];
  u32 current[SETS], initial[SETS];  // the step's own cells; the state before the first step
  auto load = [&](bool more) {       // factors of the next step, from shared memory
#pragma unroll
    for (int i = 0; i < SETS; ++i) {
      const uint4 s = read_16(s_stage + of_stage + s_of(i));
      const u32 before = more ? read_4(c_stage + next(of_stage) + c_of(i)) : initial[i];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 early = j ? s.z : s.x, late = j ? s.w : s.y;
        if (GRU) {
          const float n = low_half(early), tr = high_half(early);
          const float tz = low_half(late), from_h = high_half(late);
          const float new_part = (.5f - .5f * tz) * (1.f - n * n);
          a[i][j][0] = new_part;
          a[i][j][1] = new_part * from_h * (.25f - .25f * tr * tr);
          a[i][j][2] = ((j ? high(before) : low(before)) - n) * (.25f - .25f * tz * tz);
          a[i][j][3] = new_part * (.5f * tr + .5f);
          f[i][j] = .5f * tz + .5f;
        } else {
          const float ti = low_half(early), tf = high_half(early);
          const float z = low_half(late), to = high_half(late);
          const float tc = tanh_fast(j ? high_half(current[i]) : low_half(current[i]));
          const float in = .5f * ti + .5f, out = .5f * to + .5f;
          a[i][j][0] = z * (.25f - .25f * ti * ti);
          a[i][j][1] = (j ? high_half(before) : low_half(before)) * (.25f - .25f * tf * tf);
          a[i][j][2] = in - in * z * z;
          a[i][j][3] = tc * (.25f - .25f * to * to);
          ac[i][j] = out - out * tc * tc;
          f[i][j] = .5f * tf + .5f;
        }
      }
      if (!GRU) current[i] = before;
    }
  };

  zero_shared(fetch_base, AHEAD * STAGE);
#if BULK
  if (threadIdx.x < AHEAD) start_bulk_barrier(bars + 8 * threadIdx.x, NW);
#endif
  await_block();
  for (int k = 0; k < AHEAD; ++k) fetch(k < T);
#if BULK
  await_next();
  if (T > 1) await_next();
#else
  await_copies<AHEAD - 2>();
#endif
#pragma unroll
  for (int i = 0; i < SETS; ++i) {
    const bool is_there = WINDOW(i) < left;
    initial[i] = 0, passed[i][0] = passed[i][1] = 0.f;
    if (STATES && is_there) {
      const float *of = (GRU ? h0 : c0) + state_at + WINDOW(i) * H;
      const float v = load_float(of), second = load_float(of + 1);
      initial[i] = GRU ? pack(v, second) : pack_half(v, second);
    }
    if (LAST) {
      const float *of = (const float *)dy + (model * B + window + WINDOW(i)) * AT + direction * H + unit;
      dh[i][0] = is_there ? load_float(of) : 0.f, dh[i][1] = is_there ? load_float(of + 1) : 0.f;
    } else {
      const u32 v = read_4(y_stage + c_of(i));
      dh[i][0] = low(v), dh[i][1] = high(v);
    }
    current[i] = GRU ? 0 : read_4(c_stage + c_of(i));
  }
  load(T > 1);

  for (int t0 = 0; t0 < T; t0 += 2)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int t = t0 + u;
      if (u && t >= T) break;
      const u32 buffer = u * BUFFER;
      uint4 d[SETS];
#pragma unroll
      for (int i = 0; i < SETS; ++i) {
        u32 pairs[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float out = dh[i][j], inner = GRU ? out : passed[i][j] + out * ac[i][j];
          pairs[j][0] = pack(inner * a[i][j][0], inner * a[i][j][1]);
          pairs[j][1] = pack(inner * a[i][j][2], out * a[i][j][3]);
          passed[i][j] = inner * f[i][j];
        }
        d[i] = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
        write_16((i % E ? other_at : write_at) + buffer + i / E * GROUP, d[i]);
      }
      await_block();
      of_stage = next(of_stage);
      constexpr int CHAINS = 4 / KSPLIT, COUNT = STEPS / LOADS, SOON = COUNT < 4 ? COUNT : 4;
      float sums[NT][KSPLIT][CHAINS][4];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[nt][i / CHAINS][i % CHAINS][k] = 0.f;
      uint4 v[COUNT][NT];
      auto read = [&](int b) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          v[b][nt] = read_16(read_at + buffer + nt * GROUP + 32 * LOADS * b);
      };
#pragma unroll
      for (int b = 0; b < SOON; ++b) read(b);
      u32 from_y[SETS];
#pragma unroll
      for (int b = 0; b < COUNT; ++b) {
        if (b >= SOON) read(b);
        if (b == COUNT / 4) {  // what is not in the chain of steps
#pragma unroll
          for (int i = 0; i < SETS; ++i)
            if (WINDOW(i) < left) store_16(d_at + 4 * WINDOW(i) * AT, d[i]);
          fetch(t + AHEAD < T);
#if BULK
          if (t + 2 < T) await_next();
#else
          await_copies<AHEAD - 2>();
#endif
#pragma unroll
          for (int i = 0; i < SETS; ++i)
            from_y[i] = LAST || (STATES && t + 1 >= T) ? 0 : read_4(y_stage + of_stage + c_of(i));
          load(t + 2 < T);
          await_warp();
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int k = 0; k < LOADS; ++k)
#pragma unroll
            for (int m = 0; m < KSPLIT; ++m) {
              const int chain = KSPLIT == 2 ? (E == 1 ? k / 2 : k) : (LOADS * b + k) % 4;
              multiply(sums[nt][m][chain], U[m][LOADS * b + k], k % 2 ? v[b][nt].z : v[b][nt].x,
                       k % 2 ? v[b][nt].w : v[b][nt].y);
            }
      }
      d_at += 4 * stride;
      auto sum = [&](int nt, int m, int j, int e) {
        const float(&s)[CHAINS][4] = sums[nt][m];
        const int k = 2 * j + e, l = E == 1 ? 2 * j + 1 : k;
        return KSPLIT == 2 ? s[0][k] + s[1][l]
                           : (s[0][k] + s[1][k]) + (s[CHAINS - 2][l] + s[CHAINS - 1][l]);
      };
      float given[SETS][2];
      if (KSPLIT == 2) {
        constexpr int other = KSPLIT - 1;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          uint4 out = make_uint4(0, 0, 0, 0);
          out.x = __float_as_uint(sum(nt, other, 0, 0)), out.y = __float_as_uint(sum(nt, other, 1, 0));
          if (E == 2) {
            out.z = __float_as_uint(sum(nt, other, 0, E - 1));
            out.w = __float_as_uint(sum(nt, other, 1, E - 1));
          }
          write_16(mine_at + nt * THREADS * 16, out);
        }
        await_neighbour(warp);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const uint4 in = read_16(given_at + nt * THREADS * 16);
          given[nt * E][0] = __uint_as_float(in.x), given[nt * E][1] = __uint_as_float(in.y);
          if (E == 2) {
            given[nt * E + E - 1][0] = __uint_as_float(in.z);
            given[nt * E + E - 1][1] = __uint_as_float(in.w);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < SETS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          dh[i][j] = sum(i / E, 0, j, i % E) + (LAST ? 0.f : j ? high(from_y[i]) : low(from_y[i]));
          if (KSPLIT == 2) dh[i][j] += given[i][j];
          if (GRU) dh[i][j] += passed[i][j];
        }
    }

#if STATES
#pragma unroll
  for (int i = 0; i < SETS; ++i)
    if (WINDOW(i) < left)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        store_4(dh0 + state_at + WINDOW(i) * H + j, __float_as_uint(dh[i][j]));
        if (!GRU) store_4(dc0 + state_at + WINDOW(i) * H + j, __float_as_uint(passed[i][j]));
      }
#endif
}
#endif
