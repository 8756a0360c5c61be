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
OPERATIONS(fp32, float, load_float, store_float)
OPERATIONS(bf16, u16, load_bf16, store_bf16)
