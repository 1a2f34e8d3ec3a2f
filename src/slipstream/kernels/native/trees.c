/* The sums of the leaves that windows reach in boosted trees.

A tree has at most 32 leaves, which are the bits of a number. A window starts with all leaves of the
tree, and each split takes away those on its other side, whichever way the window came: one leaf is
left. That is the same few instructions for every window, so that a vector of windows is done at a
time, without a branch and without going from node to node.

    features [D, B]       output    [M]: the sum that a tree adds to
    feature  [M, S]       threshold [M, S]: left where the feature is at most that
    path     [M, S, L]    1 where a leaf is on the left of a split, -1 on the right
    lefts    [M, L]       -1: no such leaf
    value    [M, L]       outputs   [K, B], the constants at first

A sum adds its trees in their order, in double precision. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define V 16
#define GROUPS 4 /* vectors of windows that take a tree together */
#define BLOCK (GROUPS * V)

typedef ptrdiff_t num;
typedef float vec __attribute__((vector_size(4 * V)));
typedef float loose_vec __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(4 * V)));
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

typedef struct { /* as in Python */
    int64_t B, M, S, L, threads;
    const float *features;
    const int32_t *feature;
    const float *threshold;
    const int8_t *path, *lefts;
    const float *value;
    const int64_t *output;
    double *outputs;
    Parallel parallel;
    int (*number)(void); /* of the thread that asks */
} Call;

typedef struct {
    const Call *call;
    int32_t *masks; /* [M, 1 + 2 * S]: all leaves; those that each split leaves on either side */
    num threads;
} Work;

static void fill_masks(const Call *c, int32_t *masks) {
    for (num tree = 0; tree < c->M; tree++) {
        uint32_t all = 0;
        for (num leaf = 0; leaf < c->L; leaf++) all |= (uint32_t)(c->lefts[tree * c->L + leaf] >= 0) << leaf;
        *masks++ = (int32_t)all;
        for (num split = 0; split < c->S; split++) {
            const int8_t *path = c->path + (tree * c->S + split) * c->L;
            uint32_t left = 0, right = 0;
            for (num leaf = 0; leaf < c->L; leaf++) {
                left |= (uint32_t)(path[leaf] > 0) << leaf;
                right |= (uint32_t)(path[leaf] < 0) << leaf;
            }
            *masks++ = (int32_t)~right;
            *masks++ = (int32_t)~left;
        }
    }
}

static void add_leaves(const Call *c, const int32_t *masks, const float *features, num row, double *sums, num row_sums) {
    for (num tree = 0; tree < c->M; tree++) {
        const int32_t *feature = c->feature + tree * c->S;
        const float *threshold = c->threshold + tree * c->S;
        union { bits vectors[GROUPS]; uint32_t each[BLOCK]; } left;
        for (int g = 0; g < GROUPS; g++) left.vectors[g] = (bits){0} + *masks;
        masks++;
        for (num split = 0; split < c->S; split++, masks += 2) {
            const float *x = features + feature[split] * row;
            const vec limit = threshold[split] - (vec){0};
            for (int g = 0; g < GROUPS; g++) {
                const bits is_left = *(const loose_vec *)(x + g * V) <= limit;
                left.vectors[g] &= (is_left & masks[0]) | (~is_left & masks[1]);
            }
        }
        const float *value = c->value + tree * c->L;
        double *sum = sums + c->output[tree] * row_sums;
        for (num b = 0; b < BLOCK; b++) sum[b] += value[__builtin_ctz(left.each[b])];
    }
}

static void run_share(void *data) {
    const Work *w = data;
    const Call *c = w->call;
    const num thread = w->threads > 1 ? c->number() : 0, blocks = c->B / BLOCK;
    const num end = blocks * (thread + 1) / w->threads;
    for (num block = blocks * thread / w->threads; block < end; block++)
        add_leaves(c, w->masks, c->features + block * BLOCK, c->B, c->outputs + block * BLOCK, c->B);
}

/* B is a multiple of `trees_block()`. Returns 0, or 1 if there is not enough memory. */
int trees_add(const Call *c) {
    Work work = {.call = c, .threads = 1};
    work.masks = malloc(sizeof(int32_t) * (size_t)(c->M * (1 + 2 * c->S) + 1));
    if (!work.masks) return 1;
    fill_masks(c, work.masks);
    if (c->threads > 1 && c->parallel && c->number) {
        work.threads = c->threads;
        c->parallel(run_share, &work, (unsigned)c->threads, 0);
    } else {
        run_share(&work);
    }
    free(work.masks);
    return 0;
}

int trees_block(void) { return BLOCK; }
