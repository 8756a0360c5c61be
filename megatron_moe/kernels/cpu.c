/* The weighted SwiGLU and RMSNorm on a CPU: one pass over the rows forward, one backward.

   Each function computes what `moe/experts.py` and `model/norm.py` write in torch's operations, in fp32 and in their
   order, and rounds once, to nearest even: its results are theirs to the bit. So the exponential is the one torch uses (Sleef's expf with
   an error of at most 1.0 ulp), and sums are added in torch's order. It is compiled without -ffast-math and without
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
   stored in fewer bits than fp32 is rounded at random, by a hash of the element's place in the whole model. */

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

static inline float power_of_two(int exponent) { return from_bits((u32)(exponent + 127) << 23); }

/* The smallest exponent of `base` (2, or 4 for squares) with which the largest of a group is within the limit. */
static inline int exponent_for(float largest, float limit, int log_base) {
  int exponent = ((int)(to_bits(largest) >> 23) - 127) / log_base - 10;
  const int smallest = -126 / log_base;
  exponent = exponent < smallest ? smallest : exponent;
  while (largest > limit * power_of_two(log_base * exponent)) exponent++;
  return exponent;
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

static inline u32 coded_square(float value, float rounded_root, u32 chance) { /* of 0 to 65025 */
  float root = (float)(int)rounded_root;
  root = root * root > value ? root - 1.0f : root;
  const float over = value - root * root, width = root + root + 1.0f;
  return (u32)root + (over > (float)chance * 0x1p-16f * width ? 1u : 0u);
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

static inline u32 rounded_to_bf16(u32 bits) { return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; }

/* Whether a number of these bits is in the middle of two bf16 numbers, and rounds down to the even one. */
static inline u32 is_tie(u32 bits) { return (bits & 0x1ffffu) == 0x8000u; }

/* Rounded down or up by a number below 2^16. An infinity stays one, and so does the NaN that arithmetic makes. */
static inline u16 chosen_bf16(float value, u32 chance) { return (u16)((to_bits(value) + chance) >> 16); }

/* Of the row of an element, so that mixed(seed + i * 0x9e3779b9) is the chance of the i-th element from there. */
static inline u32 seed_of(const Adam *of, i64 at) {
  const i64 position = of->start + at, row = position / of->width;
  const u64 place = (u64)of->places[row];
  const u32 seed = mixed(mixed((u32)place ^ of->seeds[0]) ^ (u32)(place >> 32) ^ of->seeds[1]);
  return seed + (u32)(position - row * of->width + of->first_column) * 0x9e3779b9u;
}

static inline void set_ties(u8 *restrict ties, const float *restrict values, u32 any, int count) {
  for (int i = 0; i < (count + 7) / 8; i++) ties[i] = 0;
  if (any) /* one group in a thousand */
    for (int i = 0; i < count; i++) ties[i / 8] |= (u8)(is_tie(to_bits(values[i])) << (i % 8));
}

/* roots: of the values, rounded; top: the bits of the largest size, which are in the order of the sizes, with what is no
   number at the end. */
INLINE pack_codes(const Adam *of, int which, i64 from, int count, int format, const float *restrict values,
                  const float *restrict roots, u32 top, const u32 *restrict chances) {
  u8 *restrict codes = (u8 *)of->moments[which] + from;
  const int square = which == 1 && format == INT8, shift = 16 * which;
  const int finite = top < 0x7f800000u;
  const float limit = format == FP8 ? 448.0f : square ? 65025.0f : 127.0f;
  const int exponent = finite ? exponent_for(from_bits(top), limit, square ? 2 : 1) : -128;
  of->exponents[which][from / GROUP] = (i8)exponent;
  if (!finite) {
    for (int i = 0; i < count; i++) codes[i] = 1;
    return;
  }
  const float inverse = power_of_two(-exponent);
  u32 wide[GROUP]; /* loops over one width of numbers are faster */
  for (int i = 0; i < count; i++) {
    const u32 chance = (chances[i] >> shift) & 0xffffu;
    const float size = __builtin_fabsf(values[i]) * inverse;
    u32 code;
    if (square) code = coded_square(size * inverse, roots[i] * inverse, chance);
    else if (format == FP8) code = coded_fp8(size, chance);
    else code = (u32)(int)(size + (float)(int)chance * 0x1p-16f);
    if (which == 1) code = code == 0u && values[i] > 0.0f ? 1u : code; /* the step is divided by its root */
    else if (format == FP8) code |= to_bits(values[i]) >> 24 & 0x80u; /* of a zero too */
    else code = values[i] < 0.0f ? 0u - code : code;
    wide[i] = code;
  }
  for (int i = 0; i < count; i++) codes[i] = (u8)wide[i];
}

INLINE unpack_moment(const Adam *of, int which, i64 from, int count, float *restrict to) {
  const void *stored = of->moments[which];
  if (of->formats[which] == FP32) {
    const float *restrict wide = (const float *)stored + from;
    for (int i = 0; i < count; i++) to[i] = wide[i];
  } else if (of->formats[which] == BF16) {
    const u16 *restrict narrow = (const u16 *)stored + from;
    for (int i = 0; i < count; i++) to[i] = load_bf16(narrow + i);
  } else {
    const u8 *restrict codes = (const u8 *)stored + from;
    const int exponent = of->exponents[which][from / GROUP];
    const float scale = exponent == -128 ? __builtin_nanf("") : power_of_two(exponent);
    if (of->formats[which] == FP8)
      for (int i = 0; i < count; i++) to[i] = decoded_fp8(codes[i]) * scale;
    else if (which == 0)
      for (int i = 0; i < count; i++) to[i] = (float)(i8)codes[i] * scale;
    else
      for (int i = 0; i < count; i++) to[i] = (float)(codes[i] * codes[i]) * scale * scale;
  }
}

INLINE pack_moment(const Adam *of, int which, i64 from, int count, const float *restrict values,
                   const u32 *restrict chances) {
  void *stored = of->moments[which];
  const int shift = 16 * which, format = of->formats[which];
  if (format == FP32) {
    float *restrict wide = (float *)stored + from;
    for (int i = 0; i < count; i++) wide[i] = values[i];
  } else if (format == BF16) {
    u16 *restrict narrow = (u16 *)stored + from;
    for (int i = 0; i < count; i++) narrow[i] = chosen_bf16(values[i], (chances[i] >> shift) & 0xffffu);
  } else {
    float roots[GROUP];
    u32 top = 0;
    for (int i = 0; i < count; i++) {
      const u32 size = to_bits(values[i]) & 0x7fffffffu;
      roots[i] = __builtin_sqrtf(values[i]);
      top = size > top ? size : top;
    }
    pack_codes(of, which, from, count, format, values, roots, top, chances);
  }
}

INLINE unpack_main(const Adam *of, i64 from, int count, float *restrict to) {
  if (of->main) {
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

INLINE pack_main(const Adam *of, i64 from, int count, const float *restrict values) {
  if (of->main) {
    float *restrict main = of->main + from;
    for (int i = 0; i < count; i++) main[i] = values[i];
    return;
  }
  u16 *restrict weight = of->weight + from;
  i16 *restrict rest = of->rest + from;
  u32 any = 0;
  for (int i = 0; i < count; i++) {
    const u32 bits = to_bits(values[i]);
    weight[i] = (u16)rounded_to_bf16(bits);
    rest[i] = (i16)bits; /* the weight taken away leaves the lower half */
    any |= is_tie(bits);
  }
  set_ties(of->ties + from / 8, values, any, count);
}

INLINE chances_of(const Adam *of, i64 from, int count, u32 *restrict chances) {
  for (int i = 0; i < count;) {
    const i64 left = of->width - (of->start + from + i) % of->width;
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

INLINE adam_group(const Adam *of, i64 from, int count) {
  float weight[GROUP], first[GROUP], second[GROUP], old[GROUP];
  u32 chances[GROUP];
  const float *restrict grad = of->grad + from;
  const float first_share = of->first_share, second_share = of->second_share, second_decay = of->second_decay;
  const float keep = of->keep, step_size = of->step_size, root_correction = of->root_correction, eps = of->eps;
  unpack_main(of, from, count, weight);
  unpack_moment(of, 0, from, count, first);
  unpack_moment(of, 1, from, count, old);
  if (of->places) chances_of(of, from, count, chances);
  for (int i = 0; i < count; i++) {
    const float slope = grad[i];
    first[i] = __builtin_fmaf(first_share, slope - first[i], first[i]);
    second[i] = __builtin_fmaf(second_share * slope, slope, old[i] * second_decay);
  }
  settle_tail(of, from, count, old, grad, second);
  for (int i = 0; i < count; i++) {
    const float size = __builtin_sqrtf(second[i]) / root_correction + eps;
    weight[i] = weight[i] * keep - step_size * first[i] / size;
  }
  pack_main(of, from, count, weight);
  pack_moment(of, 0, from, count, first, chances);
  pack_moment(of, 1, from, count, second, chances);
}

/* A whole group, of one row and without ties among its main weights, in one loop, and one more for each moment in
   codes, whose scale is known when all were updated. What is constant at a call is no branch in the loops. */
INLINE adam_in_one_loop(const Adam *of, i64 from, const int packed, const int format0, const int format1) {
  float *restrict main = of->main + (packed ? 0 : from);
  u16 *restrict weight = of->weight + (packed ? from : 0);
  i16 *restrict rest = of->rest + (packed ? from : 0);
  float *restrict first32 = (float *)of->moments[0] + from, *restrict second32 = (float *)of->moments[1] + from;
  u16 *restrict first16 = (u16 *)of->moments[0] + from, *restrict second16 = (u16 *)of->moments[1] + from;
  const float *restrict grad = of->grad + from;
  const float first_share = of->first_share, second_share = of->second_share, second_decay = of->second_decay;
  const float keep = of->keep, step_size = of->step_size, root_correction = of->root_correction, eps = of->eps;
  const u32 seed = format0 != FP32 || format1 != FP32 ? seed_of(of, from) : 0u;
  float values[GROUP], firsts[GROUP], seconds[GROUP], roots[GROUP];
  if (format0 > BF16) unpack_moment(of, 0, from, GROUP, firsts);
  if (format1 > BF16) unpack_moment(of, 1, from, GROUP, seconds);
  u32 chances[GROUP], any = 0, top0 = 0, top1 = 0;
  u32 place = seed;
  for (int i = 0; i < GROUP; i++, place += 0x9e3779b9u) {
    const u32 chance = mixed(place);
    const float slope = grad[i];
    const float old = packed ? from_bits(((u32)weight[i] << 16) + (u32)(int)rest[i]) : main[i];
    float old_first, old_second;
    if (format0 == FP32) old_first = first32[i];
    else if (format0 == BF16) old_first = load_bf16(first16 + i);
    else old_first = firsts[i];
    if (format1 == FP32) old_second = second32[i];
    else if (format1 == BF16) old_second = load_bf16(second16 + i);
    else old_second = seconds[i];
    const float first = __builtin_fmaf(first_share, slope - old_first, old_first);
    const float second = __builtin_fmaf(second_share * slope, slope, old_second * second_decay);
    const float root = __builtin_sqrtf(second);
    const float value = old * keep - step_size * first / (root / root_correction + eps);
    if (packed) {
      const u32 bits = to_bits(value);
      weight[i] = (u16)rounded_to_bf16(bits);
      rest[i] = (i16)bits;
      values[i] = value;
      any |= is_tie(bits);
    } else {
      main[i] = value;
    }
    if (format0 > BF16 || format1 > BF16) chances[i] = chance;
    if (format0 == FP32) first32[i] = first;
    else if (format0 == BF16) first16[i] = chosen_bf16(first, chance & 0xffffu);
    else {
      const u32 size = to_bits(first) & 0x7fffffffu;
      firsts[i] = first;
      top0 = size > top0 ? size : top0;
    }
    if (format1 == FP32) second32[i] = second;
    else if (format1 == BF16) second16[i] = chosen_bf16(second, chance >> 16);
    else {
      const u32 size = to_bits(second) & 0x7fffffffu;
      seconds[i] = second;
      if (format1 == INT8) roots[i] = root;
      top1 = size > top1 ? size : top1;
    }
  }
  if (packed) set_ties(of->ties + from / 8, values, any, GROUP);
  if (format0 > BF16) pack_codes(of, 0, from, GROUP, format0, firsts, roots, top0, chances);
  if (format1 > BF16) pack_codes(of, 1, from, GROUP, format1, seconds, roots, top1, chances);
}

/* A whole group of one row, of a format that has a loop, without ties among its main weights. */
static int fits_one_loop(const Adam *of, i64 from) {
  const int codes = of->formats[0] > BF16 || of->formats[1] > BF16;
  if (codes && of->formats[0] != of->formats[1]) return 0; /* each loop takes the compiler a tenth of a second */
  if (of->n - from < GROUP || (of->places && (of->start + from) % of->width > of->width - GROUP)) return 0;
  if (of->main) return 1;
  const u64 *ties = (const u64 *)(of->ties + from / 8);
  return (ties[0] | ties[1]) == 0;
}

#define ONE_LOOP(packed, format0, format1)                                                          \
  case 16 * (packed) + 4 * (format0 - FP32) + format1 - FP32:                                       \
    adam_in_one_loop(of, from, packed, format0, format1);                                           \
    break;
#define ONE_LOOP_EACH(format0, format1) ONE_LOOP(0, format0, format1) ONE_LOOP(1, format0, format1)

static void adam_groups(const Adam *of, i64 first, i64 last) {
  const int kind = (of->main ? 0 : 16) + 4 * (of->formats[0] - FP32) + of->formats[1] - FP32;
  for (i64 from = first * GROUP; from < last * GROUP; from += GROUP) {
    if (!fits_one_loop(of, from)) {
      adam_group(of, from, of->n - from < GROUP ? (int)(of->n - from) : GROUP);
      continue;
    }
    switch (kind) {
      ONE_LOOP_EACH(FP32, FP32)
      ONE_LOOP_EACH(FP32, BF16)
      ONE_LOOP_EACH(BF16, FP32)
      ONE_LOOP_EACH(BF16, BF16)
      ONE_LOOP_EACH(INT8, INT8)
      ONE_LOOP_EACH(FP8, FP8)
    }
  }
}

void adam_update(const Adam *of) {
  const int threads = of->threads;
  SPLIT((of->n + GROUP - 1) / GROUP, threads, adam_groups(of, first, last); (void)thread)
}
