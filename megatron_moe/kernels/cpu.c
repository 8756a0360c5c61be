/* The weighted SwiGLU and RMSNorm on a CPU: one pass over the rows forward, one backward.

   Each function computes what `moe/experts.py` and `model/norm.py` write in torch's operations, in fp32 and in their
   order, and rounds once, to nearest even: its results are theirs to the bit, for rows of at least two vectors; torch adds
   narrower rows in another order. So the exponential is the one torch uses (Sleef's expf with an error of at most 1.0 ulp),
   and sums are added in torch's order. It is compiled without -ffast-math and without
   contraction: the fused multiplications are those that are written here.

   Rows are split among `threads` threads of OpenMP; with one thread no parallel region starts. No headers are
   included, so that a compiler is all it takes. */

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

extern int omp_get_thread_num(void);

/* ---- numbers */

static inline float from_bits(u32 bits) {
  union { u32 bits; float value; } both = {.bits = bits};
  return both.value;
}

static inline u32 to_bits(float value) {
  union { float value; u32 bits; } both = {.value = value};
  return both.bits;
}

static inline float load_float(const float *at) { return *at; }
static inline void store_float(float *at, float value) { *at = value; }
static inline float load_bf16(const u16 *at) { return from_bits((u32)*at << 16); }

static inline void store_bf16(u16 *at, float value) {
  u32 bits = to_bits(value);
  u32 even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *at = (u16)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : even); /* a NaN stays one */
}

/* fp16: its exponent's bias is 112 less than fp32's, and its subnormal numbers are normal ones in fp32 */
static inline float load_fp16(const u16 *at) {
  const u32 size = (*at & 0x7fffu) << 13, sign = (*at & 0x8000u) << 16;
  const u32 tiny = to_bits(from_bits(size + (113u << 23)) - from_bits(113u << 23));
  const u32 normal = size + (size < 0x7c00u << 13 ? 112u << 23 : 224u << 23); /* infinity and NaN */
  return from_bits(sign | (size < 0x400u << 13 ? tiny : normal));
}

static inline void store_fp16(u16 *at, float value) {
  const u32 bits = to_bits(value), size = bits & 0x7fffffffu;
  const u32 tiny = to_bits(from_bits(size) + 0.5f) - (126u << 23); /* 0.5 has 2^-24, fp16's least, as its last place */
  const u32 normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const u32 nan = 0x7e00u | ((size >> 13) & 0x3ffu);
  const u32 large = size > 0x7f800000u ? nan : 0x7c00u;
  *at = (u16)(bits >> 16 & 0x8000u) | (u16)(size < 113u << 23 ? tiny : size < 143u << 23 ? normal : large);
}

static inline float exponential(float x) {
  float whole = __builtin_rintf(x * 0x1.715476p+0f); /* 1 / ln 2 */
  whole = whole > 150.0f ? 150.0f : whole;
  whole = whole < -150.0f ? -150.0f : whole;
  /* ln 2 in two parts: the first has few bits, so that its product with a whole number is exact */
  float rest = __builtin_fmaf(whole, -0x1.62e4p-1f, x);
  rest = __builtin_fmaf(whole, -0x1.7f7d1cp-20f, rest);
  float sum = 0.000198527617612853646278381f;
  sum = __builtin_fmaf(sum, rest, 0.00139304355252534151077271f);
  sum = __builtin_fmaf(sum, rest, 0.00833336077630519866943359f);
  sum = __builtin_fmaf(sum, rest, 0.0416664853692054748535156f);
  sum = __builtin_fmaf(sum, rest, 0.166666671633720397949219f);
  sum = __builtin_fmaf(sum, rest, 0.5f);
  sum = 1.0f + __builtin_fmaf(rest * rest, sum, rest);
  /* times 2^whole in two steps: the first does not leave the range of exponents */
  int power = (int)(whole == whole ? whole : 0.0f), half = power >> 1;
  sum = sum * from_bits((u32)(half + 127) << 23) * from_bits((u32)(power - half + 127) << 23);
  sum = x < -104.0f ? 0.0f : sum;
  return x > 100.0f ? __builtin_inff() : sum;
}

/* ---- sums in torch's order */

/* The sum of a row: of vectors of `lanes` numbers each, four at a time, by a cascade of four levels. torch has vectors
   of 8 there on every x86 processor with AVX2 (aten/src/ATen/native/cpu/SumKernel.cpp). */
static inline __attribute__((always_inline)) float cascade(const float *row, i64 width, const int lanes) {
  float level[4][32];
  const i64 vectors = width / lanes, size = vectors / 4;
  const int across = 4 * lanes;
  i64 log = 0;
  while (size > 1 && ((i64)1 << log) < size) log++;
  const i64 power = log / 4 > 4 ? log / 4 : 4, step = (i64)1 << power;
  for (int j = 0; j < 4; j++)
    for (int c = 0; c < across; c++) level[j][c] = 0.0f;
  i64 i = 0;
  while (i + step <= size) {
    for (i64 end = i + step; i < end; i++)
      for (int c = 0; c < across; c++) level[0][c] += row[i * across + c];
    for (int j = 1; j < 4; j++) {
      for (int c = 0; c < across; c++) {
        level[j][c] += level[j - 1][c];
        level[j - 1][c] = 0.0f;
      }
      if (i & ((step - 1) << (j * power))) break;
    }
  }
  for (; i < size; i++)
    for (int c = 0; c < across; c++) level[0][c] += row[i * across + c];
  for (int j = 1; j < 4; j++)
    for (int c = 0; c < across; c++) level[0][c] += level[j][c];
  for (i64 v = 4 * size; v < vectors; v++)
    for (int c = 0; c < lanes; c++) level[0][c] += row[v * lanes + c];
  for (int k = 1; k < 4; k++)
    for (int c = 0; c < lanes; c++) level[0][c] += level[0][k * lanes + c];
  float total = 0.0f;
  for (i64 c = vectors * lanes; c < width; c++) total += row[c];
  for (int c = 0; c < lanes; c++) total += level[0][c];
  return total;
}

static float sum_of(const float *row, i64 width) {
  return width < 8 ? cascade(row, width, 1) : cascade(row, width, 8);
}

/* ---- rows among threads */

#define SPLIT(rows, threads, call)                                                                  \
  if ((threads) <= 1) {                                                                             \
    const i64 first = 0, last = (rows);                                                             \
    const int thread = 0;                                                                           \
    call;                                                                                           \
  } else {                                                                                          \
    _Pragma("omp parallel num_threads(threads)") {                                                  \
      const int thread = omp_get_thread_num();                                                      \
      const i64 first = (rows) * thread / (threads), last = (rows) * (thread + 1) / (threads);      \
      call;                                                                                         \
    }                                                                                               \
  }

/* ---- the operations, of each dtype

   gate_up [rows, 2 width], gate first; probs [rows]; hidden and grad [rows, width]; products [threads, width], room
   for a row of each thread. */

#define OPERATIONS(name, type, load, store)                                                         \
  static void forward_##name(const type *restrict gate_up, const float *restrict probs,             \
                             type *restrict hidden, i64 first, i64 last, i64 width) {               \
    for (i64 row = first; row < last; row++) {                                                      \
      const type *gates = gate_up + row * 2 * width, *ups = gates + width;                          \
      const float prob = probs[row];                                                                \
      for (i64 c = 0; c < width; c++) {                                                             \
        const float gate = load(gates + c);                                                         \
        store(hidden + row * width + c, gate / (1.0f + exponential(-gate)) * load(ups + c) * prob); \
      }                                                                                             \
    }                                                                                               \
  }                                                                                                 \
                                                                                                    \
  static void backward_##name(const type *restrict grads, const type *restrict gate_up,             \
                              const float *restrict probs, type *restrict grad_gate_up,             \
                              float *restrict grad_probs, float *restrict products, i64 first,      \
                              i64 last, i64 width) {                                                \
    for (i64 row = first; row < last; row++) {                                                      \
      const type *gates = gate_up + row * 2 * width, *ups = gates + width;                          \
      const type *grad = grads + row * width;                                                       \
      type *grad_gates = grad_gate_up + row * 2 * width, *grad_ups = grad_gates + width;            \
      const float prob = probs[row];                                                                \
      for (i64 c = 0; c < width; c++) {                                                             \
        const float gate = load(gates + c), up = load(ups + c), slope = load(grad + c);             \
        const float sigmoid = 1.0f / (1.0f + exponential(0.0f - gate)), silu = gate * sigmoid;      \
        const float weighted = slope * prob;                                                        \
        products[c] = slope * silu * up;                                                            \
        store(grad_ups + c, weighted * silu);                                                       \
        store(grad_gates + c, __builtin_fmaf(silu, 1.0f - sigmoid, sigmoid) * up * weighted);         \
      }                                                                                             \
      grad_probs[row] = sum_of(products, width);                                                    \
    }                                                                                               \
  }                                                                                                 \
                                                                                                    \
  void weighted_swiglu_forward_##name(const type *gate_up, const float *probs, type *hidden,        \
                                      i64 rows, i64 width, int threads) {                           \
    SPLIT(rows, threads, forward_##name(gate_up, probs, hidden, first, last, width); (void)thread)  \
  }                                                                                                 \
                                                                                                    \
  void weighted_swiglu_backward_##name(const type *grad, const type *gate_up, const float *probs,   \
                                       type *grad_gate_up, float *grad_probs, float *products,      \
                                       i64 rows, i64 width, int threads) {                          \
    SPLIT(rows, threads,                                                                            \
          backward_##name(grad, gate_up, probs, grad_gate_up, grad_probs,                           \
                          products + thread * width, first, last, width))                           \
  }

/* x, y, grad, grad_x [rows, width]; weight [width]; inverse_rms [rows]; grad_weights [rows, width], of which the sum
   over the rows is the weight's gradient; products as above. */

#define NORMS(name, type, load, store)                                                              \
  static void norm_##name(const type *restrict x, const type *restrict weight, type *restrict y,    \
                          float *restrict inverse_rms, float *restrict products, i64 first,         \
                          i64 last, i64 width, float eps) {                                         \
    for (i64 row = first; row < last; row++) {                                                      \
      const type *in = x + row * width;                                                             \
      type *out = y + row * width;                                                                  \
      for (i64 c = 0; c < width; c++) products[c] = load(in + c) * load(in + c);                    \
      const float inverse = 1.0f / __builtin_sqrtf(sum_of(products, width) / (float)width + eps);   \
      for (i64 c = 0; c < width; c++) store(out + c, load(in + c) * inverse * load(weight + c));    \
      inverse_rms[row] = inverse;                                                                   \
    }                                                                                               \
  }                                                                                                 \
                                                                                                    \
  static void norm_backward_##name(const type *restrict grad, const type *restrict x,               \
                                   const type *restrict weight, const float *restrict inverse_rms,  \
                                   type *restrict grad_x, float *restrict grad_weights,             \
                                   float *restrict products, i64 first, i64 last, i64 width) {      \
    for (i64 row = first; row < last; row++) {                                                      \
      const type *in = x + row * width, *slopes = grad + row * width;                               \
      const float inverse = inverse_rms[row];                                                       \
      for (i64 c = 0; c < width; c++) {                                                             \
        const float normed = load(in + c) * inverse, slope = load(slopes + c);                      \
        grad_weights[row * width + c] = slope * normed;                                             \
        products[c] = slope * load(weight + c) * normed;                                            \
      }                                                                                             \
      const float along = sum_of(products, width) / (float)width;                                   \
      for (i64 c = 0; c < width; c++) {                                                             \
        const float normed = load(in + c) * inverse, inner = load(slopes + c) * load(weight + c);   \
        store(grad_x + row * width + c, (inner - normed * along) * inverse);                        \
      }                                                                                             \
    }                                                                                               \
  }                                                                                                 \
                                                                                                    \
  void rms_norm_forward_##name(const type *x, const type *weight, type *y, float *inverse_rms,      \
                               float *products, i64 rows, i64 width, int threads, float eps) {      \
    SPLIT(rows, threads,                                                                            \
          norm_##name(x, weight, y, inverse_rms, products + thread * width, first, last, width, eps)) \
  }                                                                                                 \
                                                                                                    \
  void rms_norm_backward_##name(const type *grad, const type *x, const type *weight,                \
                                const float *inverse_rms, type *grad_x, float *grad_weights,        \
                                float *products, i64 rows, i64 width, int threads) {                \
    SPLIT(rows, threads,                                                                            \
          norm_backward_##name(grad, x, weight, inverse_rms, grad_x, grad_weights,                  \
                               products + thread * width, first, last, width))                      \
  }

NORMS(fp32, float, load_float, store_float)
NORMS(bf16, u16, load_bf16, store_bf16)
NORMS(fp16, u16, load_fp16, store_fp16)
OPERATIONS(fp32, float, load_float, store_float)
OPERATIONS(bf16, u16, load_bf16, store_bf16)
OPERATIONS(fp16, u16, load_fp16, store_fp16)

/* ---- AdamW on state that is stored in fewer bytes (precision/packed_state.py has the same in torch)

   Of n elements, 128 at a time: main weights and moments are unpacked to fp32, updated in torch's order
   (aten/src/ATen/native/cpu/FusedAdamKernel.cpp), and packed. A main weight is an fp32 number, or the bf16 weight that it
   rounds to with a 16-bit rest. A moment is fp32, bf16, or an 8-bit code with a scale of 2^exponent for each 128. What is
   stored in fewer bits than fp32 is rounded at random, by a hash of the element's place in the whole model.

   A group goes through short loops, what is between them through the cache: a processor overlaps more of a loop's turns
   the fewer steps depend on each other in one. */

enum { GROUP = 128, FP32, BF16, INT8, FP8 };
typedef unsigned char u8;
typedef signed char i8;
typedef short i16;
typedef unsigned long long u64;
#define INLINE static inline __attribute__((always_inline)) void

static inline u32 mixed(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

static inline u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 larger(u32 a, u32 b) { return a > b ? a : b; }
static inline float power_of_two(int exponent) { return from_bits((u32)(exponent + 127) << 23); }

/* A quotient to the bit of a division, by multiplications, which are faster: a first one of an error below its last
   place, corrected by what it leaves (Markstein, IBM J. Res. Dev. 34, 1990). For a quotient that is 0, infinite, or
   far from the ends of fp32's range. */
typedef struct { float divisor, inverse, rest; } Divisor;

static inline Divisor divisor_of(float by) {
  const float inverse = 1.0f / by;
  return (Divisor){by, inverse, __builtin_fmaf(-by, inverse, 1.0f) / by};
}

/* Of an infinite a, whose differences and products with 0 are no number, the quotient is infinite: 0xffc00000 is what an
   x86 processor makes then. */
static inline float number(float x) { return from_bits(smaller(to_bits(x), 0xff7fffffu)); }

static inline float divided(float a, Divisor by) {
  const float near = __builtin_fmaf(a, by.inverse, number(a * by.rest));
  return __builtin_fmaf(number(__builtin_fmaf(-near, by.divisor, a)), by.inverse, near);
}

/* The smallest exponent of `base` (2, or 4 for squares) with which the largest of a group is within the limit: as bits,
   numbers are their logarithms, nearly, and 2^exponent times the limit is exactly 2^23 of them apart. */
static inline int exponent_for(u32 largest, float limit, int log_base) {
  const int log = (int)(largest - to_bits(limit) + 0x7fffffu) >> 23;
  const int exponent = log_base == 2 ? (log + 1) >> 1 : log, smallest = -126 / log_base;
  return exponent < smallest ? smallest : exponent;
}

static inline float decoded_fp8(u32 code) {
  const u32 magnitude = code & 0x7fu;
  const float value = magnitude < 8u ? (float)magnitude * 0x1p-9f : from_bits((magnitude + 960u) << 20);
  return code & 0x80u ? -value : value;
}

static inline u32 coded_fp8(float value, u32 chance) { /* of 0 to 448 */
  const u32 small = (u32)(value * 512.0f + (float)chance * 0x1p-16f);
  const u32 large = ((to_bits(value) + (chance << 4)) >> 20) - 960u;
  return value < 0x1p-6f ? small : large;
}

static inline u32 coded_int8(float value, u32 chance) { /* of -127 to 127 */
  const float last_place = from_bits((to_bits(value) & 0x80000000u) | to_bits(0x1p-16f));
  return (u32)(int)__builtin_fmaf((float)(int)chance, last_place, value);
}

/* Of 0 to 65025, with its root; 0 only of 0: the step is divided by its root. A root that was rounded up to a whole
   number is the code itself: a smaller one would be rounded up to it whatever the chance is. */
static inline u32 coded_square(float value, float rounded_root, u32 chance) {
  const int whole = (int)rounded_root;
  const float root = (float)whole, share = (float)(int)chance * 0x1p-16f;
  const float least = from_bits(smaller(to_bits(share), to_bits(root)));
  return (u32)whole + (__builtin_fmaf(-root, root, value) > __builtin_fmaf(root + root, share, least));
}

typedef struct {
  float *main;              /* [n], or null, and then: */
  u16 *weight;              /* [n] bf16 */
  i16 *rest;                /* [n] */
  u8 *ties;                 /* a bit for each element whose rest is +32768 */
  const float *grad;        /* [n] */
  void *moments[2];         /* [n] */
  i8 *exponents[2];         /* one for each group; null without codes */
  const i64 *places;        /* of each row; null where nothing is rounded at random */
  i64 n, width, start;      /* width: of a row; start: of the first element in its row */
  i64 first_column;         /* of a row, in the whole model's */
  int formats[2], threads;
  float keep, first_share, second_share, second_decay, step_size, root_correction, eps;
  u32 seeds[2];
} Adam;

/* Rounded down or up by a number below 2^16. An infinity stays one, and so does the NaN that arithmetic makes. */
static inline u16 chosen_bf16(float value, u32 chance) { return (u16)((to_bits(value) + chance) >> 16); }

/* Of the row of an element, so that mixed(seed + i * 0x9e3779b9) is the chance of the i-th element from there. */
static inline u32 seed_of(const Adam *of, i64 at) {
  const i64 position = of->start + at, row = position / of->width;
  const u64 place = (u64)of->places[row];
  const u32 seed = mixed(mixed((u32)place ^ of->seeds[0]) ^ (u32)(place >> 32) ^ of->seeds[1]);
  return seed + (u32)(position - row * of->width + of->first_column) * 0x9e3779b9u;
}

static inline i64 left_of_row(const Adam *of, i64 at) { return of->width - (of->start + at) % of->width; }

INLINE unpack_moment(const Adam *of, const int which, i64 from, const int count, const int format,
                     float *restrict to) {
  const void *stored = of->moments[which];
  if (format == FP32) {
    const float *restrict wide = (const float *)stored + from;
    for (int i = 0; i < count; i++) to[i] = wide[i];
  } else if (format == BF16) {
    const u16 *restrict narrow = (const u16 *)stored + from;
    for (int i = 0; i < count; i++) to[i] = load_bf16(narrow + i);
  } else {
    const u8 *restrict codes = (const u8 *)stored + from;
    const int exponent = of->exponents[which][from / GROUP];
    const float scale = exponent == -128 ? __builtin_nanf("") : power_of_two(exponent);
    if (format == FP8)
      for (int i = 0; i < count; i++) to[i] = decoded_fp8(codes[i]) * scale;
    else if (which == 0)
      for (int i = 0; i < count; i++) to[i] = (float)(i8)codes[i] * scale;
    else
      for (int i = 0; i < count; i++) {
        const float root = (float)codes[i] * scale;
        to[i] = root * root;
      }
  }
}

/* roots: of the values, rounded. top: the bits of the largest size, which are in the order of the sizes, with what is no
   number at the end. */
INLINE pack_codes(const Adam *of, const int which, i64 from, const int count, const int format,
                  const float *restrict values, const float *restrict roots, u32 top, const u32 *restrict chances) {
  u8 *restrict codes = (u8 *)of->moments[which] + from;
  i8 *exponent = of->exponents[which] + from / GROUP;
  const int square = which == 1 && format == INT8, shift = 16 * which;
  if (top >= 0x7f800000u) {
    *exponent = -128;
    for (int i = 0; i < count; i++) codes[i] = 1;
    return;
  }
  *exponent = (i8)exponent_for(top, format == FP8 ? 448.0f : square ? 65025.0f : 127.0f, square ? 2 : 1);
  const float inverse = power_of_two(-*exponent), inverse_square = inverse * inverse;
  u32 wide[GROUP]; /* loops over one width of numbers are faster */
  for (int i = 0; i < count; i++) {
    const u32 chance = (chances[i] >> shift) & 0xffffu, bits = to_bits(values[i]);
    if (square) wide[i] = coded_square(values[i] * inverse_square, roots[i] * inverse, chance);
    else if (format == INT8) wide[i] = coded_int8(values[i] * inverse, chance);
    else {
      const u32 code = coded_fp8(__builtin_fabsf(values[i]) * inverse, chance);
      wide[i] = which == 1 ? larger(code, smaller(bits, 1u)) : code | (bits >> 24 & 0x80u); /* a zero's sign too */
    }
  }
  for (int i = 0; i < count; i++) codes[i] = (u8)wide[i];
}

INLINE pack_moment(const Adam *of, const int which, i64 from, const int count, const int format,
                   const float *restrict values, const float *restrict roots, u32 top,
                   const u32 *restrict chances) {
  if (format == FP32) {
    float *restrict wide = (float *)of->moments[which] + from;
    for (int i = 0; i < count; i++) wide[i] = values[i];
  } else if (format == BF16) {
    u16 *restrict narrow = (u16 *)of->moments[which] + from;
    for (int i = 0; i < count; i++) narrow[i] = chosen_bf16(values[i], (chances[i] >> 16 * which) & 0xffffu);
  } else if (format == FP8) {
    pack_codes(of, which, from, count, FP8, values, roots, top, chances);
  } else {
    pack_codes(of, which, from, count, INT8, values, roots, top, chances);
  }
}

INLINE unpack_main(const Adam *of, i64 from, const int count, const int packed, float *restrict to) {
  if (!packed) {
    const float *restrict main = of->main + from;
    for (int i = 0; i < count; i++) to[i] = main[i];
    return;
  }
  const u16 *restrict weight = of->weight + from;
  const i16 *restrict rest = of->rest + from;
  const u8 *restrict ties = of->ties + from / 8;
  u32 any = 0;
  for (int i = 0; i < (count + 7) / 8; i++) any |= ties[i];
  for (int i = 0; i < count; i++) to[i] = from_bits(((u32)weight[i] << 16) + (u32)(int)rest[i]);
  if (any)
    for (int i = 0; i < count; i++)
      if (ties[i / 8] >> (i % 8) & 1) to[i] = from_bits(to_bits(to[i]) + 0x10000u);
}

INLINE pack_main(const Adam *of, i64 from, const int count, const int packed, const float *restrict values) {
  if (!packed) {
    float *restrict main = of->main + from;
    for (int i = 0; i < count; i++) main[i] = values[i];
    return;
  }
  u16 *restrict weight = of->weight + from;
  i16 *restrict rest = of->rest + from;
  u8 *restrict ties = of->ties + from / 8;
  u32 nearest = 1; /* 0: one of the values is in the middle of two bf16 numbers, and rounds down to the even one */
  for (int i = 0; i < count; i++) {
    const u32 bits = to_bits(values[i]);
    weight[i] = (u16)((bits + 0x8000u) >> 16);
    rest[i] = (i16)bits; /* the weight taken away leaves the lower half */
    nearest = smaller(nearest, (bits & 0x1ffffu) ^ 0x8000u);
  }
  for (int i = 0; i < (count + 7) / 8; i++) ties[i] = 0;
  if (nearest == 0u) /* one group in a thousand */
    for (int i = 0; i < count; i++)
      if ((to_bits(values[i]) & 0x1ffffu) == 0x8000u) {
        weight[i] = (u16)(to_bits(values[i]) >> 16);
        ties[i / 8] |= (u8)(1u << (i % 8));
      }
}

INLINE chances_of(const Adam *of, i64 from, const int count, u32 *restrict chances) {
  for (int i = 0; i < count;) {
    const i64 left = left_of_row(of, from + i);
    const int stop = left < count - i ? i + (int)left : count;
    const u32 seed = seed_of(of, from + i) - (u32)i * 0x9e3779b9u;
    for (int j = i; j < stop; j++) chances[j] = mixed(seed + (u32)j * 0x9e3779b9u);
    i = stop;
  }
}

/* torch takes the last numbers, which fill no vector of 8, one by one, and its compiler has fused another product with
   the sum there. */
INLINE settle_tail(const Adam *of, i64 from, int count, const float *old, const float *grad, float *second) {
  if (from + count < of->n) return;
  for (int i = count - (int)(of->n % 8); i < count; i++)
    second[i] = __builtin_fmaf(old[i], of->second_decay, of->second_share * grad[i] * grad[i]);
}

INLINE adam_group(const Adam *of, i64 from, const int count, const int packed, const int format0,
                  const int format1, const Divisor correction) {
  float weight[GROUP], first[GROUP], second[GROUP], old[GROUP], root[GROUP];
  u32 chances[GROUP], top0 = 0, top1 = 0;
  const float *restrict grad = of->grad + from;
  const float first_share = of->first_share, second_share = of->second_share, second_decay = of->second_decay;
  const float keep = of->keep, step_size = of->step_size, eps = of->eps;
  unpack_moment(of, 0, from, count, format0, first);
  unpack_moment(of, 1, from, count, format1, old);
  const int in_one_row = count == GROUP && of->places && left_of_row(of, from) >= GROUP;
  const u32 seed = in_one_row ? seed_of(of, from) : 0u;
  for (int i = 0; i < count; i++) {
    const float slope = grad[i];
    first[i] = __builtin_fmaf(first_share, slope - first[i], first[i]);
    second[i] = __builtin_fmaf(second_share * slope, slope, old[i] * second_decay);
    top0 = larger(top0, to_bits(first[i]) & 0x7fffffffu);
    top1 = larger(top1, to_bits(second[i]));
    if (in_one_row) { /* the hash is done while the root is awaited */
      root[i] = __builtin_sqrtf(second[i]);
      chances[i] = mixed(seed + (u32)i * 0x9e3779b9u);
    }
  }
  if (!in_one_row) {
    settle_tail(of, from, count, old, grad, second);
    top1 = 0;
    for (int i = 0; i < count; i++) {
      root[i] = __builtin_sqrtf(second[i]);
      top1 = larger(top1, to_bits(second[i]));
    }
    if (of->places) chances_of(of, from, count, chances);
  }
  pack_moment(of, 0, from, count, format0, first, root, top0, chances);
  pack_moment(of, 1, from, count, format1, second, root, top1, chances);
  unpack_main(of, from, count, packed, weight);
  for (int i = 0; i < count; i++)
    weight[i] = weight[i] * keep - step_size * first[i] / (divided(root[i], correction) + eps);
  pack_main(of, from, count, packed, weight);
}

/* Have the memory of a group on its way: each loop would wait for its own. */
INLINE fetch(const void *array, i64 from, const int size) {
  for (int at = 0; at < GROUP * size; at += 64) __builtin_prefetch((const char *)array + from * size + at, 1);
}

INLINE fetch_group(const Adam *of, i64 from, const int packed, const int format0, const int format1) {
  fetch(of->grad, from, 4);
  if (packed) {
    fetch(of->weight, from, 2);
    fetch(of->rest, from, 2);
  } else {
    fetch(of->main, from, 4);
  }
  fetch(of->moments[0], from, format0 == FP32 ? 4 : format0 == BF16 ? 2 : 1);
  fetch(of->moments[1], from, format1 == FP32 ? 4 : format1 == BF16 ? 2 : 1);
}

/* What is constant at a call is no branch in the groups' loops, which is a tenth of their time. */
#define WHOLE_GROUPS(packed, format0, format1)                                                      \
  for (; from + GROUP <= end; from += GROUP) {                                                      \
    fetch_group(of, from + 6 * GROUP, packed, format0, format1);                                    \
    adam_group(of, from, GROUP, packed, format0, format1, correction);                              \
  }

static void adam_groups(const Adam *of, i64 first, i64 last) {
  const Divisor correction = divisor_of(of->root_correction);
  const int packed = !of->main, format0 = of->formats[0], format1 = of->formats[1];
  const i64 end = last * GROUP < of->n ? last * GROUP : of->n;
  i64 from = first * GROUP;
  if (packed && format0 == BF16 && format1 == BF16) WHOLE_GROUPS(1, BF16, BF16)
  else if (packed && format0 == INT8 && format1 == INT8) WHOLE_GROUPS(1, INT8, INT8)
  else if (packed && format0 == FP8 && format1 == FP8) WHOLE_GROUPS(1, FP8, FP8)
  else WHOLE_GROUPS(packed, format0, format1)
  if (from < end) adam_group(of, from, (int)(end - from), packed, format0, format1, correction);
}

void adam_update(const Adam *of) {
  const int threads = of->threads;
  SPLIT((of->n + GROUP - 1) / GROUP, threads, adam_groups(of, first, last); (void)thread)
}
