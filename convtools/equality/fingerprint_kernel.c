/* The additive fingerprint's inner loop; docs/fingerprint.md defines what it computes.

   Why it exists: a block's products stay in registers, so that it runs near the speed at which memory is
   read. It holds no definition of its own: the constants come from fingerprint.py through `configure`,
   and the tests hold it against the Python of the definition.

   Offsets in memory ("from") and in the canonical tensor ("at") are bytes. The GIL is released. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if !defined(__SIZEOF_INT128__) || !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs 128-bit integers and a little-endian machine; without this module numpy does the work"
#endif

typedef unsigned __int128 u128;

#define WORDS 128            /* words of 8 bytes a block */
#define BLOCK (8 * WORDS)    /* bytes a block */
#define LIMB 54              /* bits of either half of a constant: 64 + 54 + log2(128) < 128 */
#define PRIME ((((u128)1) << 127) - 1)
#define MAX_LOOPS 32
#define STAGE 4096           /* bytes that are gathered where runs are short */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2
#define QUARTER 27 /* bits of a quarter of a constant: 32 + 27 + log2(128 / 4 lanes) = 64 */
static uint64_t QUARTERS[4][WORDS] __attribute__((aligned(32)));
#endif

#ifdef HAVE_AVX2
#define LOW_BITS 48 /* of a word; the other 16 are multiplied apart */
static uint64_t FIFTYTWOS[3][WORDS] __attribute__((aligned(64)));  /* a constant in limbs of 52 bits */
static u128 INVERSE_SQUARED;
static uint64_t THIRTYSIXES[3][WORDS] __attribute__((aligned(64))); /* and of 36: 16 + 36 = 52 */
#endif

static uint64_t LOW[WORDS], HIGH[WORDS];
static int simd = 0, best = 0; /* vector instructions that are wanted, and there: none, AVX2, AVX-512 IFMA */
static u128 GAMMA, INVERSE;       /* gamma, and its inverse mod p */
static u128 POWERS[8][256];       /* gamma^(digit * 256^place) */
static int configured = 0;

static inline u128 folded(u128 x) /* any x -> x mod p */
{
    x = (x & PRIME) + (x >> 127);
    return x >= PRIME ? x - PRIME : x;
}

static inline u128 product(u128 x, u128 y) /* x, y < p -> x * y mod p, by 2^127 = 1 */
{
    uint64_t x0 = (uint64_t)x, x1 = (uint64_t)(x >> 64), y0 = (uint64_t)y, y1 = (uint64_t)(y >> 64);
    u128 low = (u128)x0 * y0, high = (u128)x1 * y1;
    u128 middle = (u128)x0 * y1 + (u128)x1 * y0; /* < 2^128, for x1 and y1 have 63 bits */
    u128 sum = folded(low) + ((middle << 65 >> 65) << 64); /* its 63 low bits, times 2^64 */
    sum = folded(sum) + (high << 1);                       /* times 2^128 = 2 */
    sum = folded(sum) + (middle >> 63);                    /* its high bits, times 2^127 = 1 */
    return folded(sum);
}

static u128 power(uint64_t block) /* gamma^(block + 1) */
{
    u128 out = 1;
    block++; /* the first block has gamma itself: a small tensor's sums fill all bits too */
    for (int place = 0; block; place++, block >>= 8)
        if (block & 255)
            out = product(out, POWERS[place][block & 255]);
    return out;
}

static inline u128 shifted(u128 x, int bits) /* x < p -> x * 2^bits mod p: a rotation of 127 bits */
{
    return ((x << bits) & PRIME) | (x >> (127 - bits));
}

static inline u128 joined(u128 low, u128 high) /* low + 2^54 high mod p */
{
    return folded(folded(low) + shifted(folded(high), LIMB));
}

typedef struct {
    u128 total;       /* what was closed so far */
    u128 low, high;   /* the open block */
    uint64_t block;   /* which block is open */
    unsigned words;   /* additions to it; 128 of them fit */
    uint64_t known;   /* a block whose power is at hand */
    u128 known_power;
    uint64_t stride;  /* how far the last jump went, for runs lie at even distances */
    u128 stride_power;
} Sum;

static u128 power_at(Sum *s, uint64_t block)
{
    if (block != s->known) {
        uint64_t stride = block - s->known;
        if (block > s->known && stride == s->stride) {
            s->known_power = product(s->known_power, s->stride_power);
        } else {
            s->known_power = power(block);
            s->stride = stride;
            s->stride_power = block > s->known ? power(stride - 1) : 1;
            if (block < s->known)
                s->stride = 0;
        }
        s->known = block;
    }
    return s->known_power;
}

static void close_block(Sum *s)
{
    if (s->words)
        s->total = folded(s->total + product(power_at(s, s->block), joined(s->low, s->high)));
    s->low = s->high = 0;
    s->words = 0;
}

static inline void open_block(Sum *s, uint64_t block, unsigned words)
{
    if (block != s->block || s->words + words > WORDS) {
        close_block(s);
        s->block = block;
    }
    s->words += words;
}

static inline u128 block_plain(const unsigned char *from)
{
    u128 low = 0, high = 0;
    for (int j = 0; j < WORDS; j++) {
        uint64_t w;
        memcpy(&w, from + 8 * j, 8);
        low += (u128)w * LOW[j];
        high += (u128)w * HIGH[j];
    }
    return joined(low, high);
}

/* whole blocks, by Horner's rule from the first to the last with gamma's inverse */
static u128 horner_plain(const unsigned char *from, uint64_t count)
{
    u128 sum = 0;
    for (uint64_t i = 0; i < count; i++, from += BLOCK)
        sum = folded(product(sum, INVERSE) + block_plain(from));
    return sum;
}

#ifdef HAVE_AVX2
/* Four words at a time: either half of each, times each quarter of its constant, in eight sums a lane. */
__attribute__((target("avx2"))) static inline u128 words_avx2(const unsigned char *from, int first, int words)
{
    __m256i sum[8];
    for (int i = 0; i < 8; i++)
        sum[i] = _mm256_setzero_si256();
    for (int j = 0; j < words; j += 4) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(from + 8 * j)), upper = _mm256_srli_epi64(w, 32);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i k = _mm256_loadu_si256((const __m256i *)&QUARTERS[i][first + j]);
            sum[i] = _mm256_add_epi64(sum[i], _mm256_mul_epu32(w, k));
            sum[i + 4] = _mm256_add_epi64(sum[i + 4], _mm256_mul_epu32(upper, k));
        }
    }
    uint64_t lanes[8][4] __attribute__((aligned(32)));
    u128 part[4];
    for (int i = 0; i < 8; i++)
        _mm256_store_si256((__m256i *)lanes[i], sum[i]);
    for (int i = 0; i < 4; i++) {
        u128 lower = (u128)lanes[i][0] + lanes[i][1] + lanes[i][2] + lanes[i][3];
        u128 upper = (u128)lanes[i + 4][0] + lanes[i + 4][1] + lanes[i + 4][2] + lanes[i + 4][3];
        part[i] = shifted(lower + (upper << 32), QUARTER * i); /* below 2^99 before it is shifted */
    }
    return folded(folded(part[0] + part[1]) + folded(part[2] + part[3]));
}

__attribute__((target("avx2"))) static u128 horner_avx2(const unsigned char *from, uint64_t count)
{
    u128 sum = 0;
    for (uint64_t i = 0; i < count; i++, from += BLOCK)
        sum = folded(product(sum, INVERSE) + words_avx2(from, 0, WORDS));
    return sum;
}

/* Eight words at a time, by products of 52 bits of which either half is added up: at most 16 a lane, so
   that lanes add up too. Meanwhile the next block is copied, to be summed from where it then lies, and floats
   are searched for the largest: both in the shadow of the products. */
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512ifma")))
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const unsigned char *from; /* the block to copy; NULL: none */
    unsigned char *to;
    int size; /* bytes of a float; 0: not to be searched */
    __m512i most;
} Beside;

AVX512 static inline u128 lanes_ifma(const __m512i s[8])
{
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    __m512i four[4], two[2];
    for (int i = 0; i < 4; i++)
        four[i] = _mm512_add_epi64(_mm512_unpacklo_epi64(s[2 * i], s[2 * i + 1]),
                                   _mm512_unpackhi_epi64(s[2 * i], s[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        two[i] = _mm512_add_epi64(_mm512_permutex2var_epi64(four[2 * i], even, four[2 * i + 1]),
                                  _mm512_permutex2var_epi64(four[2 * i], odd, four[2 * i + 1]));
    uint64_t sum[8] __attribute__((aligned(64)));
    _mm512_store_si512(sum, _mm512_add_epi64(_mm512_shuffle_i64x2(two[0], two[1], 0x44),
                                             _mm512_shuffle_i64x2(two[0], two[1], 0xee)));
    u128 low = sum[0] + ((u128)(sum[1] + sum[2]) << 52) + ((u128)sum[5] << LOW_BITS); /* below 2^114 */
    u128 high = folded(shifted(sum[3] + sum[4], 104) + shifted(sum[7], LOW_BITS + 72));
    return folded(low + folded(high + shifted(sum[6], LOW_BITS + 36)));
}

AVX512 INLINE u128 block_ifma(const unsigned char *from, Beside *beside)
{
    const __m512i mask = _mm512_set1_epi64((1LL << LOW_BITS) - 1);
    __m512i s[8], most = beside->most;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        s[i] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < WORDS; j += 8) {
        __m512i w = _mm512_loadu_si512(from + 8 * j);
        if (beside->from)
            _mm512_storeu_si512(beside->to + 8 * j, _mm512_loadu_si512(beside->from + 8 * j));
        if (beside->size == 2) /* doubled: the sign is gone, and bits of a float grow with its size */
            most = _mm512_max_epu16(most, _mm512_add_epi16(w, w));
        else if (beside->size == 4)
            most = _mm512_max_epu32(most, _mm512_add_epi32(w, w));
        else if (beside->size == 8)
            most = _mm512_max_epu64(most, _mm512_add_epi64(w, w));
        __m512i low = _mm512_and_si512(w, mask), high = _mm512_srli_epi64(w, LOW_BITS);
        __m512i k0 = _mm512_load_si512(&FIFTYTWOS[0][j]), k1 = _mm512_load_si512(&FIFTYTWOS[1][j]);
        s[0] = _mm512_madd52lo_epu64(s[0], low, k0);
        s[1] = _mm512_madd52hi_epu64(s[1], low, k0);
        s[2] = _mm512_madd52lo_epu64(s[2], low, k1);
        s[3] = _mm512_madd52hi_epu64(s[3], low, k1);
        s[4] = _mm512_madd52lo_epu64(s[4], low, _mm512_load_si512(&FIFTYTWOS[2][j])); /* 48 and 4 bits */
        for (int i = 0; i < 3; i++)
            s[5 + i] = _mm512_madd52lo_epu64(s[5 + i], high, _mm512_load_si512(&THIRTYSIXES[i][j]));
    }
    beside->most = most;
    return lanes_ifma(s);
}

AVX512 INLINE u128 next_ifma(const unsigned char *from, Beside *beside)
{
    u128 value = block_ifma(from, beside);
    if (beside->from) {
        beside->from += BLOCK;
        beside->to += BLOCK;
    }
    return value;
}

/* two blocks at a time: only one product of a pair has to wait for the pair before */
AVX512 INLINE u128 horner_beside(const unsigned char *from, uint64_t count, Beside *beside)
{
    u128 sum = count & 1 ? next_ifma(from, beside) : 0;
    from += (count & 1) * BLOCK;
    for (uint64_t i = 0; i < count / 2; i++, from += 2 * BLOCK) {
        u128 first = product(next_ifma(from, beside), INVERSE);
        sum = folded(product(sum, INVERSE_SQUARED) + folded(first + next_ifma(from + BLOCK, beside)));
    }
    return sum;
}

AVX512 static u128 horner_ifma(const unsigned char *from, uint64_t count)
{
    Beside none = {NULL, NULL, 0, _mm512_setzero_si512()};
    return horner_beside(from, count, &none);
}

/* the same for blocks that are copied from `from` to `to` (NULL: they are not); the largest float, without
   its sign and doubled, becomes `most` */
AVX512 INLINE u128 passed(unsigned char *to, const unsigned char *from, uint64_t count, int size,
                          uint64_t *most)
{
    Beside copying = {NULL, NULL, size, _mm512_setzero_si512()};
    const unsigned char *lies = to ? to : from;
    u128 sum = 0;
    if (to) {
        memcpy(to, from, BLOCK);
        copying.from = from + BLOCK;
        copying.to = to + BLOCK;
        sum = horner_beside(lies, count - 1, &copying);
        lies += (count - 1) * BLOCK;
        count = 1;
    }
    Beside rest = {NULL, NULL, size, copying.most};
    sum = to ? folded(product(sum, INVERSE) + block_ifma(lies, &rest)) : horner_beside(lies, count, &rest);
    if (size == 2) {
        uint16_t lanes[32];
        _mm512_storeu_si512(lanes, rest.most);
        for (int i = 0; i < 32; i++)
            *most = lanes[i] > *most ? lanes[i] : *most;
    } else if (size == 4) {
        *most = _mm512_reduce_max_epu32(rest.most);
    } else if (size == 8) {
        *most = _mm512_reduce_max_epu64(rest.most);
    }
    return sum;
}

AVX512 static u128 passed_ifma(unsigned char *to, const unsigned char *from, uint64_t count, int size,
                               uint64_t *most)
{
    switch (size) {
    case 2: return passed(to, from, count, 2, most);
    case 4: return passed(to, from, count, 4, most);
    case 8: return passed(to, from, count, 8, most);
    default: return passed(to, from, count, 0, most);
    }
}

/* a part of a block, from word `first` on; `words` is a multiple of 4 */
__attribute__((target("avx2"))) static u128 part_avx2(const unsigned char *from, int first, int words)
{
    return words_avx2(from, first, words);
}
#endif

static void whole_blocks(Sum *s, const unsigned char *from, uint64_t block, uint64_t count)
{
#ifdef HAVE_AVX2
    u128 sum = simd == 2   ? horner_ifma(from, count)
               : simd == 1 ? horner_avx2(from, count)
                           : horner_plain(from, count);
#else
    u128 sum = horner_plain(from, count);
#endif
    s->total = folded(s->total + product(sum, power_at(s, block + count - 1)));
}

static void contiguous(Sum *s, const unsigned char *from, uint64_t nbytes, uint64_t at)
{
    while (nbytes) {
        uint64_t done, lead = at & 7;
        unsigned j = (unsigned)(at >> 3) & (WORDS - 1);
        if (!lead && !j && nbytes >= BLOCK) {
            whole_blocks(s, from, at / BLOCK, nbytes / BLOCK);
            done = nbytes / BLOCK * BLOCK;
        } else if (!lead && nbytes >= 8) {
            unsigned words = WORDS - j;
            if (nbytes / 8 < words)
                words = (unsigned)(nbytes / 8);
#ifdef HAVE_AVX2
            if (simd && words >= 48) { /* below that, the plain loop is as quick */
                words &= ~3U;
                u128 sum = part_avx2(from, (int)j, (int)words);
                s->total = folded(s->total + product(power_at(s, at / BLOCK), sum));
                from += 8 * words;
                at += 8 * words;
                nbytes -= 8 * words;
                continue;
            }
#endif
            open_block(s, at / BLOCK, words);
            u128 low = s->low, high = s->high;
            for (unsigned i = 0; i < words; i++) {
                uint64_t w;
                memcpy(&w, from + 8 * i, 8);
                low += (u128)w * LOW[j + i];
                high += (u128)w * HIGH[j + i];
            }
            s->low = low;
            s->high = high;
            done = 8 * words;
        } else { /* a part of a word: the rest of it is zero */
            uint64_t w = 0;
            done = nbytes < 8 - lead ? nbytes : 8 - lead;
            memcpy((unsigned char *)&w + lead, from, done);
            open_block(s, at / BLOCK, 1);
            s->low += (u128)w * LOW[j];
            s->high += (u128)w * HIGH[j];
        }
        from += done;
        at += done;
        nbytes -= done;
    }
}

typedef struct {
    uint64_t count, at, from; /* steps, and how far each goes on either side */
} Loop;

#define GATHER(size)                                                       \
    for (uint64_t k = 0; k < n; k++, next += loop->from)                   \
        memcpy(stage + (size) * k, next, (size))

/* the innermost loop, where its runs follow one another in the canonical tensor: gather, then sum */
static void gathered(Sum *s, const Loop *loop, const unsigned char *from, uint64_t at, uint64_t run)
{
    unsigned char stage[STAGE];
    const unsigned char *next = from;
    for (uint64_t left = loop->count; left;) {
        uint64_t n = STAGE / run < left ? STAGE / run : left;
        switch (run) {
        case 1: GATHER(1); break;
        case 2: GATHER(2); break;
        case 4: GATHER(4); break;
        case 8: GATHER(8); break;
        default: GATHER(run);
        }
        contiguous(s, stage, n * run, at);
        at += n * run;
        left -= n;
    }
}

static void nest(Sum *s, const Loop *loops, int depth, const unsigned char *from, uint64_t at, uint64_t run)
{
    if (depth == 0) {
        contiguous(s, from, run, at);
    } else if (depth == 1 && loops->at == run && run <= 64) {
        gathered(s, loops, from, at, run);
    } else {
        for (uint64_t i = 0; i < loops->count; i++)
            nest(s, loops + 1, depth - 1, from + i * loops->from, at + i * loops->at, run);
    }
}

/* end = start + sum of (count - 1) * step + run, or failure on overflow past 2^62 */
static int reach(const Loop *loops, int depth, int canonical, uint64_t start, uint64_t run, uint64_t *end)
{
    u128 sum = (u128)start + run;
    for (int i = 0; i < depth; i++) {
        u128 step = canonical ? loops[i].at : loops[i].from;
        if (loops[i].count >> 62 || step >> 62 || sum >> 62)
            return -1;
        u128 far = (u128)(loops[i].count - 1) * step;
        if (far >> 62)
            return -1;
        sum += far;
    }
    *end = (uint64_t)sum;
    return sum >> 62 ? -1 : 0;
}

static PyObject *accumulate(PyObject *self, PyObject *args)
{
    Py_buffer data;
    PyObject *nested;
    unsigned long long start, at, run;
    Loop loops[MAX_LOOPS];
    int depth = 0, empty = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*KKO!K", &data, &start, &at, &PyTuple_Type, &nested, &run))
        return NULL;
    Py_ssize_t given = PyTuple_GET_SIZE(nested);
    if (!configured || given > MAX_LOOPS || start >> 62 || at >> 62 || run >> 62) {
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_ValueError, configured ? "too many loops, or too large" : "not configured");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        unsigned long long n, to, of;
        PyObject *item = PyTuple_GET_ITEM(nested, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "KKK", &n, &to, &of)) {
            PyBuffer_Release(&data);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a loop is a tuple of three numbers");
            return NULL;
        }
        empty |= n == 0;
        if (n != 1)
            loops[depth++] = (Loop){n, to, of};
    }
    uint64_t end = 0, canonical_end = 0;
    empty |= run == 0;
    if (!empty && (reach(loops, depth, 0, start, run, &end) || reach(loops, depth, 1, at, run, &canonical_end) ||
                   end > (uint64_t)data.len)) {
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_ValueError, "the runs reach past the end of the data");
        return NULL;
    }
    Sum sum = {0};
    sum.known_power = GAMMA; /* of block 0 */
    if (!empty) {
        Py_BEGIN_ALLOW_THREADS
        nest(&sum, loops, depth, (const unsigned char *)data.buf + start, at, run);
        close_block(&sum);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyBytes_FromStringAndSize((const char *)&sum.total, sizeof sum.total);
}

/* Copying and looking in one pass: steps that stay in a core's first cache are copied, and what then lies
   at the destination is summed and searched for NaN and infinity. */

#define STEP 8192
#define STREAM (1 << 20)

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static uint64_t copied_avx2(unsigned char *to, const unsigned char *from,
                                                            uint64_t nbytes)
{
    uint64_t done = 0;
    for (; done + 128 <= nbytes; done += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + done));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + done + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + done + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + done + 96));
        _mm256_storeu_si256((__m256i *)(to + done), a);
        _mm256_storeu_si256((__m256i *)(to + done + 32), b);
        _mm256_storeu_si256((__m256i *)(to + done + 64), c);
        _mm256_storeu_si256((__m256i *)(to + done + 96), d);
    }
    return done;
}

/* past the caches: for what nobody looks at here, the lines that are overwritten are not read first */
__attribute__((target("avx2"))) static void streamed_avx2(unsigned char *to, const unsigned char *from,
                                                          uint64_t nbytes)
{
    uint64_t done = -(uintptr_t)to & 63;
    memcpy(to, from, done);
    for (; done + 64 <= nbytes; done += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + done));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + done + 32));
        _mm256_stream_si256((__m256i *)(to + done), a);
        _mm256_stream_si256((__m256i *)(to + done + 32), b);
    }
    _mm_sfence();
    memcpy(to + done, from + done, nbytes - done);
}
#endif

/* not by memcpy: for so few bytes its string instructions leave them outside of the first cache */
static void copied(unsigned char *to, const unsigned char *from, uint64_t nbytes)
{
    uint64_t done = 0;
#ifdef HAVE_AVX2
    if (simd)
        done = copied_avx2(to, from, nbytes);
#endif
    memmove(to + done, from + done, nbytes - done);
}

typedef struct {
    int size;          /* bytes of a float; 0: not to be searched */
    uint64_t infinity; /* bits of its exponent */
} Floats;

#define ALL_FINITE(name, type, target)                                                  \
    target static int name(const unsigned char *from, uint64_t nbytes, type infinity)   \
    {                                                                                   \
        typedef type unaligned __attribute__((aligned(1), may_alias));                  \
        const unaligned *x = (const unaligned *)from;                                   \
        type most = 0, unsigned_bits = (type)~((type)1 << (8 * sizeof(type) - 1));      \
        for (uint64_t i = 0; i < nbytes / sizeof(type); i++) {                          \
            type bits = x[i] & unsigned_bits;                                           \
            most = bits > most ? bits : most;                                           \
        }                                                                               \
        return most < infinity; /* bits of a float grow with its size */                \
    }

ALL_FINITE(finite_16, uint16_t, )
ALL_FINITE(finite_32, uint32_t, )
ALL_FINITE(finite_64, uint64_t, )
#ifdef HAVE_AVX2
ALL_FINITE(finite_16_avx2, uint16_t, __attribute__((target("avx2"))))
ALL_FINITE(finite_32_avx2, uint32_t, __attribute__((target("avx2"))))
ALL_FINITE(finite_64_avx2, uint64_t, __attribute__((target("avx2"))))
#endif

static int all_finite(const unsigned char *from, uint64_t nbytes, Floats of)
{
#ifdef HAVE_AVX2
    if (simd) {
        switch (of.size) {
        case 2: return finite_16_avx2(from, nbytes, (uint16_t)of.infinity);
        case 4: return finite_32_avx2(from, nbytes, (uint32_t)of.infinity);
        case 8: return finite_64_avx2(from, nbytes, of.infinity);
        }
    }
#endif
    switch (of.size) {
    case 2: return finite_16(from, nbytes, (uint16_t)of.infinity);
    case 4: return finite_32(from, nbytes, (uint32_t)of.infinity);
    case 8: return finite_64(from, nbytes, of.infinity);
    default: return 1;
    }
}

static PyObject *copy_and_look(PyObject *self, PyObject *args)
{
    Py_buffer to, from;
    PyObject *target;
    unsigned long long at, infinity;
    int size, summed, finite = 1;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*KpiK", &target, &from, &at, &summed, &size, &infinity))
        return NULL;
    int copies = target != Py_None;
    if (copies && PyObject_GetBuffer(target, &to, PyBUF_WRITABLE)) {
        PyBuffer_Release(&from);
        return NULL;
    }
    uint64_t nbytes = (uint64_t)from.len;
    int sized = size == 0 || ((size == 2 || size == 4 || size == 8) && nbytes % (uint64_t)size == 0);
    if (!configured || at >> 62 || (copies && to.len != from.len) || !sized) {
        PyErr_SetString(PyExc_ValueError, "no two runs of so many floats of that size");
    } else {
        Sum sum = {0};
        sum.known_power = GAMMA; /* of block 0 */
        Floats floats = {size, infinity};
        Py_BEGIN_ALLOW_THREADS
        const unsigned char *source = from.buf;
        unsigned char *lies = copies ? to.buf : from.buf;
        uint64_t done = 0;
#ifdef HAVE_AVX2
        if (simd && copies && !summed && !size && nbytes >= STREAM) {
            streamed_avx2(lies, source, nbytes);
            done = nbytes;
        }
#endif
        while (done < nbytes) {
            uint64_t within = (at + done) & (BLOCK - 1), n = STEP - within;
#ifdef HAVE_AVX2
            if (simd == 2 && summed && !within && nbytes - done >= BLOCK && (!size || !(at % (uint64_t)size))) {
                uint64_t count = (nbytes - done) / BLOCK, most = 0;
                u128 value = passed_ifma(copies ? lies + done : NULL, source + done, count, size, &most);
                u128 last = power_at(&sum, (at + done) / BLOCK + count - 1);
                sum.total = folded(sum.total + product(value, last));
                finite &= !size || most < 2 * infinity;
                done += count * BLOCK;
                continue;
            }
#endif
            n = size ? n / (uint64_t)size * (uint64_t)size : n;
            n = nbytes - done < n ? nbytes - done : n;
            if (within && n > BLOCK - within)
                n = BLOCK - within;
            if (copies)
                copied(lies + done, source + done, n);
            if (summed)
                contiguous(&sum, lies + done, n, at + done);
            if (size)
                finite &= all_finite(lies + done, n, floats);
            done += n;
        }
        close_block(&sum);
        Py_END_ALLOW_THREADS
        PyObject *out = Py_BuildValue("y#O", (const char *)&sum.total, (Py_ssize_t)sizeof sum.total,
                                      finite ? Py_True : Py_False);
        if (copies)
            PyBuffer_Release(&to);
        PyBuffer_Release(&from);
        return out;
    }
    if (copies)
        PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return NULL;
}

/* Comparing files where they lie: both sides are read, block by block, into buffers that stay in a core's
   cache, and runs are compared there without being laid out. "at" is the plain side's, "from" the other's. */

typedef struct {
    int fd;
    uint64_t from, at, run;
    int depth;
    Loop loops[MAX_LOOPS];
} Part;

static int filled(int fd, unsigned char *to, uint64_t nbytes, uint64_t from) /* -1: not all of it is there */
{
    while (nbytes) {
        ssize_t got = pread(fd, to, nbytes, (off_t)from);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        to += got;
        from += (uint64_t)got;
        nbytes -= (uint64_t)got;
    }
    return 0;
}

static int same_nest(const Loop *loops, int depth, const unsigned char *a, const unsigned char *b, uint64_t run)
{
    if (depth == 0)
        return memcmp(a, b, run) == 0;
    for (uint64_t i = 0; i < loops->count; i++)
        if (!same_nest(loops + 1, depth - 1, a + i * loops->at, b + i * loops->from, run))
            return 0;
    return 1;
}

static int same_run(int fd, uint64_t offset, const Part *part, Py_buffer *a, Py_buffer *b)
{
    uint64_t room = (uint64_t)(a->len < b->len ? a->len : b->len);
    for (uint64_t done = 0; done < part->run; done += room) {
        uint64_t n = part->run - done < room ? part->run - done : room;
        if (filled(fd, a->buf, n, offset + part->at + done) || filled(part->fd, b->buf, n, part->from + done))
            return -1;
        if (memcmp(a->buf, b->buf, n))
            return 0;
    }
    return 1;
}

/* parts that share rows of the plain side: each block of rows is read once, and compared with every part */
static int same_rows(int fd, uint64_t offset, const Part *parts, Py_ssize_t count, Py_buffer *a, Py_buffer *b)
{
    uint64_t n = parts->loops[0].count, step = parts->loops[0].at, reached = 0, most;
    if (!step || !(most = (uint64_t)a->len / step))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Part *part = parts + i;
        uint64_t skip = part->loops[0].from;
        if (part->loops[0].count != n || part->loops[0].at != step ||
            reach(part->loops + 1, part->depth - 1, 1, part->at, part->run, &reached) || reached > step ||
            reach(part->loops + 1, part->depth - 1, 0, 0, part->run, &reached) || reached > (uint64_t)b->len)
            return -1;
        if (skip && ((uint64_t)b->len - reached) / skip + 1 < most)
            most = ((uint64_t)b->len - reached) / skip + 1;
    }
    for (uint64_t row = 0; row < n; row += most) {
        uint64_t rows = n - row < most ? n - row : most;
        if (filled(fd, a->buf, rows * step, offset + row * step))
            return -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            Part part = parts[i];
            part.loops[0].count = rows;
            reach(part.loops, part.depth, 0, 0, part.run, &reached);
            if (filled(part.fd, b->buf, reached, part.from + row * part.loops[0].from))
                return -1;
            if (!same_nest(part.loops, part.depth, (unsigned char *)a->buf + part.at, b->buf, part.run))
                return 0;
        }
    }
    return 1;
}

static int part_of(PyObject *item, Part *part)
{
    PyObject *nested;
    unsigned long long from, at, run;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "iKKO!K", &part->fd, &from, &at, &PyTuple_Type, &nested, &run))
        return -1;
    Py_ssize_t given = PyTuple_GET_SIZE(nested);
    if (given > MAX_LOOPS || from >> 62 || at >> 62 || run >> 62)
        return -1;
    *part = (Part){.fd = part->fd, .from = from, .at = at, .run = run};
    for (Py_ssize_t i = 0; i < given; i++) {
        unsigned long long n, to, of;
        PyObject *loop = PyTuple_GET_ITEM(nested, i);
        if (!PyTuple_Check(loop) || !PyArg_ParseTuple(loop, "KKK", &n, &to, &of) || !n)
            return -1;
        part->loops[part->depth++] = (Loop){n, to, of};
    }
    uint64_t end;
    return reach(part->loops, part->depth, 0, from, run, &end) || reach(part->loops, part->depth, 1, at, run, &end);
}

static PyObject *same_files(PyObject *self, PyObject *args)
{
    Py_buffer a, b;
    PyObject *given;
    int fd, same = 1;
    unsigned long long offset;
    (void)self;
    if (!PyArg_ParseTuple(args, "iKO!w*w*", &fd, &offset, &PyTuple_Type, &given, &a, &b))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    Part *parts = PyMem_Calloc((size_t)count + 1, sizeof *parts);
    if (!parts || offset >> 62 || !a.len || !b.len)
        same = -1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++)
        if (part_of(PyTuple_GET_ITEM(given, i), parts + i))
            same = -1;
    if (same == 1) {
        Py_BEGIN_ALLOW_THREADS
        if (count && parts->depth)
            same = same_rows(fd, offset, parts, count, &a, &b);
        else
            for (Py_ssize_t i = 0; same == 1 && i < count; i++)
                same = parts[i].depth ? -1 : same_run(fd, offset, parts + i, &a, &b);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(parts);
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    if (PyErr_Occurred())
        return NULL;
    if (same < 0)
        Py_RETURN_NONE;
    return PyBool_FromLong(same);
}

static PyObject *configure(PyObject *self, PyObject *args)
{
    const unsigned char *bytes;
    Py_ssize_t nbytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#", &bytes, &nbytes))
        return NULL;
    if (nbytes != 16 * (WORDS + 2)) {
        PyErr_SetString(PyExc_ValueError, "expects 130 constants of 16 bytes: K, gamma and its inverse");
        return NULL;
    }
    if (!configured) { /* threads may be reading: the constants never change */
        for (int j = 0; j < WORDS; j++) {
            u128 k;
            memcpy(&k, bytes + 16 * j, 16);
            LOW[j] = (uint64_t)k & ((1ULL << LIMB) - 1);
            HIGH[j] = (uint64_t)(k >> LIMB) & ((1ULL << LIMB) - 1);
#ifdef HAVE_AVX2
            for (int i = 0; i < 4; i++)
                QUARTERS[i][j] = (uint64_t)(k >> (QUARTER * i)) & ((1ULL << QUARTER) - 1);
            for (int i = 0; i < 3; i++) {
                FIFTYTWOS[i][j] = (uint64_t)(k >> (52 * i)) & ((1ULL << 52) - 1);
                THIRTYSIXES[i][j] = (uint64_t)(k >> (36 * i)) & ((1ULL << 36) - 1);
            }
#endif
        }
        memcpy(&GAMMA, bytes + 16 * WORDS, 16);
        memcpy(&INVERSE, bytes + 16 * (WORDS + 1), 16);
        u128 base = GAMMA;
        for (int place = 0; place < 8; place++) {
            POWERS[place][0] = 1;
            for (int digit = 1; digit < 256; digit++)
                POWERS[place][digit] = product(POWERS[place][digit - 1], base);
            base = product(POWERS[place][255], base);
        }
#ifdef HAVE_AVX2
        __builtin_cpu_init();
        best = __builtin_cpu_supports("avx2") != 0;
        if (best && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512ifma"))
            best = 2;
        simd = best;
        INVERSE_SQUARED = product(INVERSE, INVERSE);
#endif
        configured = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *vector(PyObject *self, PyObject *args)
{
    int wanted = 0, before = simd;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &wanted))
        return NULL;
    simd = wanted < 0 ? 0 : wanted < best ? wanted : best;
    return PyLong_FromLong(before);
}

static PyMethodDef methods[] = {
    {"accumulate", accumulate, METH_VARARGS,
     "accumulate(data, start, at, loops, run) -> the partial sum as 16 little-endian bytes"},
    {"copy_and_look", copy_and_look, METH_VARARGS,
     "copy_and_look(to, from, at, summed, size, infinity) -> (the partial sum as 16 little-endian bytes, "
     "whether all floats of `size` bytes are finite; 0: not looked at) of what lies at `to`, or of `from` "
     "where it is None"},
    {"configure", configure, METH_VARARGS, "configure(constants): once, before anything else"},
    {"same_files", same_files, METH_VARARGS,
     "same_files(fd, offset, parts, a, b) -> whether all parts are the same; None: not to be told this way"},
    {"vector", vector, METH_VARARGS,
     "vector(most) -> the level of vector instructions that was used (0 none, 1 AVX2, 2 AVX-512 IFMA); for "
     "tests: all give the same"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fingerprint_kernel", "The additive fingerprint's inner loop.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_fingerprint_kernel(void) { return PyModule_Create(&module); }
