/* Recurrent layers on a CPU: all time steps of a layer in one call, forward and backward.

A thread takes its share of the windows through all steps, a chunk at a time, so threads wait for
each other once per call, and what a step needs stays in the cache. A product and the gates' math
alternate on a few rows: what the product gives never leaves the first-level cache.

Shapes and slots as in `slipstream.kernels.rnn`: K lanes, W directions, T steps, B windows,
D inputs, H units, G gates; P is H rounded up to whole vectors. Units beyond H have weights of zero.

    x      [K, T, B, D]           y      [K, T, B, W * H]
    slots  [K, W, T, B, 4, P]     factors; `backward` overwrites them with the slots' gradients
    carry  [K, W, T, B, C, P]     C is 2 in an LSTM, 1 in a GRU
    before [C, K, B, H]           h, and in an LSTM c, before the first step; null: zeros. With one
                                  direction only; there is no gradient of it
    after  [K, B, H]              in an LSTM: c after the last step

Time runs as in x and y, for both directions. */

#include "vectors.h"

#define CHUNK 48 /* windows that go through all steps before the next ones */

typedef struct {
    int is_lstm;
    num K, W, T, B, D, H, P;
    num x_slots, h_slots, first_h; /* slots that x and h enter, and the first that h does */
    num slices, threads;           /* shares of the windows, and what runs them */
    const float *x;
    const float *packed; /* by lane and direction, from `pack` */
    float *y, *slots, *carry, *scratch;
    const float *before;
    float *after;
    const float *dy;
    num dy_lane, dy_time, dy_row; /* dy_time 0: of the last step's outputs only */
    float *dx, *dw;
    num packed_size, scratch_size, dw_size;
    int (*number)(void); /* of the thread that asks */
} Layer;

INLINE num gate_of(const Layer *l, num slot) { /* in PyTorch's order */
    return l->is_lstm ? slot : (slot + 2) % 3;
}

static void fill_sizes(Layer *l) {
    const num P = l->P = round_up(l->H), d = round_up(l->D);
    l->x_slots = l->h_slots = l->is_lstm ? 4 : 3;
    l->first_h = l->is_lstm ? 0 : 1;
    l->packed_size = 4 * P + P * (l->x_slots * l->D + l->h_slots * l->H) +
                     l->h_slots * P * P + l->x_slots * P * d;
    l->scratch_size = CHUNK * (2 * P + d) + R * 4 * V;
    l->dw_size = 4 * P + P * (l->x_slots * l->D + l->h_slots * l->H);
}

/* w [slots][D or H] of some units, as the forward product reads it: [unit / V][column][slot][V] */
static float *pack_rows(const Layer *l, const float *w, num columns, num first, num slots, float *to) {
    for (num block = 0; block < l->P; block += V)
        for (num column = 0; column < columns; column++)
            for (num slot = first; slot < first + slots; slot++)
                for (num unit = block; unit < block + V; unit++)
                    *to++ = unit < l->H ? w[(gate_of(l, slot) * l->H + unit) * columns + column] : 0;
    return to;
}

/* The same as the backward product reads it: [columns / 4V][slot][unit][4V] */
static float *pack_columns(const Layer *l, const float *w, num columns, num first, num slots, float *to) {
    for (num block = 0; block < round_up(columns); block += 4 * V)
        for (num slot = first; slot < first + slots; slot++)
            for (num unit = 0; unit < l->P; unit++)
                for (num column = block; column < min(block + 4 * V, round_up(columns)); column++)
                    *to++ = unit < l->H && column < columns
                                ? w[(gate_of(l, slot) * l->H + unit) * columns + column]
                                : 0;
    return to;
}

/* Bias [P / V][4][V], then the rows of w_ih and w_hh; for `backward` the columns of w_hh and w_ih. */
static void pack(const Layer *l, const float *const weights[4], float *to, int backward) {
    const float *ih = weights[0], *hh = weights[1], *b_ih = weights[2], *b_hh = weights[3];
    if (backward) {
        to = pack_columns(l, hh, l->H, l->first_h, l->h_slots, to);
        if (l->dx) pack_columns(l, ih, l->D, 0, l->x_slots, to);
        return;
    }
    for (num block = 0; block < l->P; block += V)
        for (num slot = 0; slot < 4; slot++)
            for (num unit = block; unit < block + V; unit++) {
                const num at = gate_of(l, slot) * l->H + unit;
                const int from_x = slot < l->x_slots, from_h = slot >= l->first_h;
                *to++ = unit < l->H ? (from_x ? b_ih[at] : 0) + (from_h ? b_hh[at] : 0) : 0;
            }
    to = pack_rows(l, ih, l->D, 0, l->x_slots, to);
    pack_rows(l, hh, l->H, l->first_h, l->h_slots, to);
}

/* ---- forward ---- */

typedef struct {
    float *y, *slots, *carry, *state; /* of one row and one vector of units; slots may be null */
    num P;
    num units; /* that exist */
    int is_first;
} Cell;

INLINE void write_output(const Cell *cell, vec h) {
    if (cell->units >= V) store(cell->y, h);
    else memcpy(cell->y, &h, sizeof(float) * (size_t)cell->units);
}

INLINE void step_lstm(const Cell *cell, const float *sums) {
    const vec i = sigmoid(load(sums)), f = sigmoid(load(sums + V));
    const vec g = tanh_of(load(sums + 2 * V)), o = sigmoid(load(sums + 3 * V));
    const vec before = cell->is_first ? splat(0) : load(cell->state);
    const vec c = f * before + i * g, tanh_c = tanh_of(c), h = o * tanh_c;
    const num P = cell->P;
    store(cell->state, c);
    write_output(cell, h);
    if (!cell->slots) return;
    store(cell->slots, g * i * (1.0f - i));
    store(cell->slots + P, before * f * (1.0f - f));
    store(cell->slots + 2 * P, i * (1.0f - g * g));
    store(cell->slots + 3 * P, h * (1.0f - o));
    store(cell->carry, o - h * tanh_c);
    store(cell->carry + P, f);
}

INLINE void step_gru(const Cell *cell, const float *sums) {
    const vec from_h = load(sums + 3 * V), r = sigmoid(load(sums + V)), z = sigmoid(load(sums + 2 * V));
    const vec n = tanh_of(load(sums) + r * from_h);
    const vec before = cell->is_first ? splat(0) : load(cell->state);
    const vec h = n + z * (before - n), of_x = (1.0f - z) * (1.0f - n * n);
    const num P = cell->P;
    store(cell->state, h);
    write_output(cell, h);
    if (!cell->slots) return;
    store(cell->slots, of_x);
    store(cell->slots + P, of_x * r * (1.0f - r) * from_h);
    store(cell->slots + 2 * P, (before - n) * z * (1.0f - z));
    store(cell->slots + 3 * P, of_x * r);
    store(cell->carry, z);
}

/* One step of a few windows, from `row` on, and of one vector of units. */
static void forward_block(const Layer *l, num lane, num direction, num t, num row, num rows, num unit,
                          float *state, float *sums) {
    const num H = l->H, P = l->P, W = l->W, carries = l->is_lstm ? 2 : 1;
    const num now = direction ? l->T - 1 - t : t, before = direction ? now + 1 : now - 1;
    const float *bias = l->packed + (lane * W + direction) * l->packed_size;
    const float *ih = bias + 4 * P + unit * l->x_slots * l->D;
    const float *hh = bias + 4 * P + P * l->x_slots * l->D + unit * l->h_slots * H;
    const float *x = l->x + ((lane * l->T + now) * l->B + row) * l->D;
    const num y_row = W * H;
    float *y = l->y + (lane * l->T * l->B + row) * y_row + direction * H;
    for (num r = 0; r < rows; r++) memcpy(sums + r * 4 * V, bias + unit * 4, sizeof(float) * 4 * V);
    const Product with_x = {x, l->D, 1, ih, l->x_slots * V, sums, 4 * V, l->D};
    MULTIPLIES[rows - 1][l->x_slots - 1](&with_x);
    if (t || l->before) {
        const float *h = t ? y + before * l->B * y_row : l->before + (lane * l->B + row) * H;
        const Product with_h = {h, t ? y_row : H, 1, hh, l->h_slots * V, sums + l->first_h * V, 4 * V, H};
        MULTIPLIES[rows - 1][l->h_slots - 1](&with_h);
    }
    const num at = ((lane * W + direction) * l->T + now) * l->B + row;
    Cell cell = {y + now * l->B * y_row + unit, l->slots ? l->slots + at * 4 * P + unit : NULL,
                 l->slots ? l->carry + at * carries * P + unit : NULL, state + unit, P, H - unit, !t && !l->before};
    for (num r = 0; r < rows; r++) {
        if (l->is_lstm) step_lstm(&cell, sums + r * 4 * V);
        else step_gru(&cell, sums + r * 4 * V);
        cell.y += y_row;
        cell.state += P;
        if (!cell.slots) continue;
        cell.slots += 4 * P;
        cell.carry += carries * P;
    }
}

static void forward_chunk(const Layer *l, num lane, num direction, num first, num count, float *scratch) {
    const num blocks = (count + R - 1) / R;
    float *sums = scratch, *state = scratch + R * 4 * V;
    const num H = l->H, P = l->P, of_c = l->is_lstm ? l->K * l->B * H : 0;
    const size_t row_bytes = sizeof(float) * (size_t)H;
    if (l->before) {
        memset(state, 0, sizeof(float) * (size_t)(count * P));
        for (num r = 0; r < count; r++)
            memcpy(state + r * P, l->before + of_c + (lane * l->B + first + r) * H, row_bytes);
    }
    for (num t = 0; t < l->T; t++)
        for (num unit = 0; unit < l->P; unit += V)
            for (num block = 0; block < blocks; block++) {
                const num row = count * block / blocks, end = count * (block + 1) / blocks;
                forward_block(l, lane, direction, t, first + row, end - row, unit, state + row * l->P, sums);
            }
    if (l->after)
        for (num r = 0; r < count; r++)
            memcpy(l->after + (lane * l->B + first + r) * H, state + r * P, row_bytes);
}

/* ---- backward ---- */

/* The gradients of a step's slots, written over their factors; dh becomes what the step before it
gets without a product. */
INLINE void step_back_lstm(float *slots, const float *carry, float *dh, float *dc, num P) {
    const vec of_h = load(dh), of_c = load(dc) + of_h * load(carry);
    store(slots, of_c * load(slots));
    store(slots + P, of_c * load(slots + P));
    store(slots + 2 * P, of_c * load(slots + 2 * P));
    store(slots + 3 * P, of_h * load(slots + 3 * P));
    store(dc, of_c * load(carry + P));
    store(dh, splat(0));
}

INLINE void step_back_gru(float *slots, const float *carry, float *dh, num P) {
    const vec of_h = load(dh);
    for (num slot = 0; slot < 4; slot++) store(slots + slot * P, of_h * load(slots + slot * P));
    store(dh, of_h * load(carry));
}

static void add_numbers(float *to, const float *from, num count) {
    for (num n = 0; n < count; n++) to[n] += from[n];
}

/* dw [columns][slots * P] += the slots' gradients, by the numbers that entered them. */
static void add_weight_gradients(const Layer *l, const float *slots, num num_slots, const float *in,
                                 num in_row, num columns, num rows, float *dw) {
    const num width = num_slots * l->P;
    for (num n = 0; n < width; n += 4 * V) {
        const Product p = {in, 1, in_row, slots + n, 4 * l->P, dw + n, width, rows};
        multiply_rows(p, columns, min(4, (width - n) / V));
    }
}

static void backward_step(const Layer *l, num lane, num direction, num t, num first, num count,
                          float *scratch, float *dw) {
    const num H = l->H, P = l->P, D = l->D, W = l->W, carries = l->is_lstm ? 2 : 1;
    const num now = direction ? l->T - 1 - t : t, before = direction ? now + 1 : now - 1;
    float *dh = scratch, *dc = dh + CHUNK * P, *sums = dc + CHUNK * P;
    const num at = ((lane * W + direction) * l->T + now) * l->B + first;
    float *slots = l->slots + at * 4 * P;
    const float *carry = l->carry + at * carries * P;
    if (l->dy_time || t + 1 == l->T)
        for (num r = 0; r < count; r++)
            add_numbers(dh + r * P,
                        l->dy + lane * l->dy_lane + now * l->dy_time + (first + r) * l->dy_row + direction * H, H);
    for (num r = 0; r < count; r++)
        for (num unit = 0; unit < P; unit += V) {
            float *slot = slots + r * 4 * P + unit;
            const float *carried = carry + r * carries * P + unit;
            if (l->is_lstm) step_back_lstm(slot, carried, dh + r * P + unit, dc + r * P + unit, P);
            else step_back_gru(slot, carried, dh + r * P + unit, P);
        }
    const float *x = l->x + ((lane * l->T + now) * l->B + first) * D;
    for (num n = 0; n < 4 * P; n += V) {
        vec sum = splat(0);
        for (num r = 0; r < count; r++) sum += load(slots + r * 4 * P + n);
        store(dw + n, load(dw + n) + sum);
    }
    add_weight_gradients(l, slots, l->x_slots, x, D, D, count, dw + 4 * P);
    const float *packed = l->packed + (lane * W + direction) * l->packed_size;
    const float *of_h = slots + l->first_h * P;
    if (t || l->before) {
        const num y_row = t ? W * H : H;
        const float *y = t ? l->y + ((lane * l->T + before) * l->B + first) * y_row + direction * H
                           : l->before + (lane * l->B + first) * H;
        add_weight_gradients(l, of_h, l->h_slots, y, y_row, H, count, dw + 4 * P + D * l->x_slots * P);
    }
    if (t) {
        for (num n = 0; n < P; n += 4 * V) {
            const num width = min(4 * V, P - n);
            const Product p = {of_h, 4 * P, 1, packed + n * l->h_slots * P, width, dh + n, P, l->h_slots * P};
            multiply_rows(p, count, width / V);
        }
    }
    if (!l->dx) return;
    const num d = round_up(D);
    memset(sums, 0, sizeof(float) * (size_t)(count * d));
    for (num n = 0; n < d; n += 4 * V) {
        const num width = min(4 * V, d - n);
        const float *w = packed + l->h_slots * P * P + n * l->x_slots * P;
        const Product p = {slots, 4 * P, 1, w, width, sums + n, d, l->x_slots * P};
        multiply_rows(p, count, width / V);
    }
    float *dx = l->dx + ((lane * l->T + now) * l->B + first) * D;
    for (num r = 0; r < count; r++)
        if (direction) add_numbers(dx + r * D, sums + r * d, D);
        else memcpy(dx + r * D, sums + r * d, sizeof(float) * (size_t)D);
}

static void backward_chunk(const Layer *l, num lane, num direction, num first, num count, float *scratch,
                           float *dw) {
    memset(scratch, 0, sizeof(float) * (size_t)(2 * CHUNK * l->P));
    for (num t = l->T; t-- > 0;) backward_step(l, lane, direction, t, first, count, scratch, dw);
}

/* ---- calls ---- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

/* A thread's share: lanes, and slices of their windows, one after the other. */
static void run_share(void *data) {
    const Layer *l = data;
    const num thread = l->number ? l->number() : 0, tasks = l->K * l->slices;
    float *scratch = l->scratch + thread * l->scratch_size;
    for (num task = thread; task < tasks; task += l->threads) {
        const num lane = task / l->slices, slice = task % l->slices;
        const num begin = l->B * slice / l->slices, rows = l->B * (slice + 1) / l->slices - begin;
        const num chunks = (rows + CHUNK - 1) / CHUNK;
        for (num direction = 0; direction < l->W; direction++) {
            float *dw = l->dw ? l->dw + (task * l->W + direction) * l->dw_size : NULL;
            if (dw) memset(dw, 0, sizeof(float) * (size_t)l->dw_size);
            for (num chunk = 0; chunk < chunks; chunk++) {
                const num first = begin + rows * chunk / chunks, end = begin + rows * (chunk + 1) / chunks;
                if (dw) backward_chunk(l, lane, direction, first, end - first, scratch, dw);
                else forward_chunk(l, lane, direction, first, end - first, scratch);
            }
        }
    }
}

static void run(Layer *l, Parallel parallel) {
    if (l->threads > 1 && parallel && l->number) {
        parallel(run_share, l, (unsigned)l->threads, 0);
        return;
    }
    l->threads = 1;
    l->number = NULL;
    run_share(l);
}

/* The sums of all slices, in PyTorch's order of gates: d_ih [G * H, D], d_hh, d_b_ih, d_b_hh. */
static void unpack_gradients(const Layer *l, num lane, num direction, float *const grads[4]) {
    const num H = l->H, P = l->P, D = l->D;
    float *sum = l->dw + (lane * l->slices * l->W + direction) * l->dw_size;
    for (num slice = 1; slice < l->slices; slice++)
        add_numbers(sum, sum + slice * l->W * l->dw_size, l->dw_size);
    const float *of_x = sum + 4 * P, *of_h = of_x + D * l->x_slots * P;
    for (num slot = 0; slot < 4; slot++)
        for (num unit = 0; unit < H; unit++) {
            const num gate = gate_of(l, slot) * H + unit, h_slot = slot - l->first_h;
            if (slot < l->x_slots) {
                grads[2][gate] = sum[slot * P + unit];
                for (num n = 0; n < D; n++) grads[0][gate * D + n] = of_x[(n * l->x_slots + slot) * P + unit];
            }
            if (h_slot >= 0) {
                grads[3][gate] = sum[slot * P + unit];
                for (num n = 0; n < H; n++) grads[1][gate * H + n] = of_h[(n * l->h_slots + h_slot) * P + unit];
            }
        }
}

typedef struct { /* as in Python */
    int64_t is_lstm, K, W, T, B, D, H, slices, threads;
    const float *x;
    const float *weights[4]; /* w_ih, w_hh, b_ih, b_hh, each of all lanes and directions */
    float *y, *slots, *carry;
    const float *before;
    float *after;
    const float *dy;
    int64_t dy_lane, dy_time, dy_row;
    float *dx;       /* null where it is not needed */
    float *grads[4]; /* of the weights */
    Parallel parallel;
    int (*number)(void);
} Call;

static void locate(const Layer *l, num which, num offsets[4]) {
    const num rows = which * (l->is_lstm ? 4 : 3) * l->H;
    offsets[0] = rows * l->D;
    offsets[1] = rows * l->H;
    offsets[2] = offsets[3] = rows;
}

/* 0, or 1 if there is not enough memory. */
static int call(const Call *c, int backward) {
    Layer l = {.is_lstm = c->is_lstm != 0, .K = c->K, .W = c->W, .T = c->T, .B = c->B, .D = c->D,
               .H = c->H, .slices = c->slices, .threads = c->threads, .x = c->x, .y = c->y,
               .slots = c->slots, .carry = c->carry, .before = c->before, .after = c->after, .dy = c->dy, .dy_lane = c->dy_lane,
               .dy_time = c->dy_time, .dy_row = c->dy_row, .dx = c->dx, .number = c->number};
    fill_sizes(&l);
    const num models = l.K * l.W, of_dw = backward ? models * l.slices * l.dw_size : 0;
    const num size = models * l.packed_size + l.threads * l.scratch_size + of_dw;
    float *memory = malloc(sizeof(float) * (size_t)size);
    if (!memory) return 1;
    l.packed = memory;
    l.scratch = memory + models * l.packed_size;
    l.dw = backward ? l.scratch + l.threads * l.scratch_size : NULL;
    num offset[4];
    for (num which = 0; which < models; which++) {
        locate(&l, which, offset);
        const float *weights[4];
        for (int n = 0; n < 4; n++) weights[n] = c->weights[n] + offset[n];
        pack(&l, weights, memory + which * l.packed_size, backward);
    }
    run(&l, c->parallel);
    for (num which = 0; backward && which < models; which++) {
        locate(&l, which, offset);
        float *grads[4];
        for (int n = 0; n < 4; n++) grads[n] = c->grads[n] + offset[n];
        unpack_gradients(&l, which / l.W, which % l.W, grads);
    }
    free(memory);
    return 0;
}

int rnn_forward(const Call *c) { return call(c, 0); }
int rnn_backward(const Call *c) { return call(c, 1); }
int rnn_vector(void) { return V; }
