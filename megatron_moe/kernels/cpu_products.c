/* Products of groups of rows on a CPU with AVX-512: those of all groups by one call.

   A library multiplies one pair of matrices at a time. It wakes its threads for each, and generates code for each number
   of rows, of which an MoE layer has others in every step. Here threads take blocks of all groups' results. The order in
   which a sum is added depends on the number of its terms alone: not on the rows next to it, nor on threads.

   Operands are packed into panels of 12 lines and of 32 columns, so that 24 of the 32 registers hold sums. What is packed
   are words: an fp32 number, or two bf16 numbers, which AVX512_BF16 multiplies and adds to an fp32 sum. */

#ifdef __AVX512F__

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef float floats __attribute__((vector_size(64)));
typedef u32 words __attribute__((vector_size(64)));
typedef u16 halves __attribute__((vector_size(32)));
/* as they lie in memory */
typedef float float_line __attribute__((vector_size(64), aligned(4), may_alias));
typedef u32 word_line __attribute__((vector_size(64), aligned(2), may_alias));
typedef u16 half_line __attribute__((vector_size(32), aligned(2), may_alias));
typedef u32 word __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

enum {
  HIGH = 12, WIDE = 32,       /* a tile of sums */
  STEPS = 256,                /* words of a sum in one pass: a panel of 32 columns stays in the first cache */
  LINES = 504, COLUMNS = 512, /* a block, at most: its panels of 12 lines stay in the second cache */
  FP32_STEPS = 128            /* fp32 sums of so many terms are added up, which rounds less than a long one does */
};

typedef floats Tile[HIGH][WIDE / 16];

typedef struct {
  const char *left, *right;
  char *result;                               /* [rows, width], or [groups, height, width] */
  const int *ends;                            /* [groups], of their rows */
  char *room;                                 /* product_room bytes for each thread */
  i64 groups, rows, height, width, depth;
  i64 left_stride, right_stride, right_group; /* in numbers */
  i64 columns, next;                          /* of a block; the first one that no thread has taken */
  int over_rows;  /* whether sums are over the rows of left [rows, height] and right [rows, width], or over the depth of
                     left [rows, depth] and right [groups, depth, width] */
  int transposed; /* whether right is stored as [groups, width, depth] */
  int adds;       /* whether to add to the result, which is fp32, */
  int rounds;     /* after rounding to bf16 */
  int threads;
} Product;

enum { PANELS = (LINES + HIGH) * STEPS * 4, PANEL = STEPS * WIDE * 4, SUMS = (LINES + HIGH) * COLUMNS * 4 };
const i64 product_room = PANELS + PANEL + SUMS;

INLINE words load(const void *at) { return *(const word_line *)at; }
static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* ---- Packing: word s of line l goes to s * panel + l. Lines from `lines` to `panel` are zeros. */

#define EACH(of, size)                                                                              \
  (words) {                                                                                         \
    of(0, size), of(1, size), of(2, size), of(3, size), of(4, size), of(5, size), of(6, size),      \
    of(7, size), of(8, size), of(9, size), of(10, size), of(11, size), of(12, size), of(13, size),  \
    of(14, size), of(15, size)                                                                      \
  }
#define FIRST(c, size) ((c) & (size) ? 16 + ((c) ^ (size)) : (c))
#define SECOND(c, size) ((c) & (size) ? 16 + (c) : (c) ^ (size))

/* Blocks of `size` words off the diagonal change places. */
#define SWAP(line, size)                                                                            \
  UNROLLED for (int i = 0; i < 16; i++) if (!(i & (size))) {                                        \
    const words one = line[i], other = line[i + (size)];                                            \
    line[i] = __builtin_shuffle(one, other, EACH(FIRST, size));                                     \
    line[i + (size)] = __builtin_shuffle(one, other, EACH(SECOND, size));                           \
  }

/* Lines whose words are next to each other. */
INLINE void pack_lines(const char *from, i64 stride, i64 lines, i64 steps, u32 *to, const int panel) {
  for (int first = 0; first < panel; first += 16) {
    const int high = panel - first < 16 ? panel - first : 16;
    i64 step = 0;
    for (; step + 16 <= steps; step += 16) {
      words line[16];
      UNROLLED for (int i = 0; i < 16; i++)
        line[i] = i < high && first + i < lines ? load(from + (first + i) * stride + step * 4) : (words){0};
      SWAP(line, 1)
      SWAP(line, 2)
      SWAP(line, 4)
      SWAP(line, 8)
      /* In a panel of 12, what is too much is overwritten by the next step; there is room behind the last one. */
      UNROLLED for (int i = 0; i < 16; i++) *(word_line *)(to + (step + i) * panel + first) = line[i];
    }
    for (; step < steps; step++)
      for (int i = first; i < first + high; i++)
        to[step * panel + i] = i < lines ? *(const word *)(from + i * stride + step * 4) : 0u;
  }
}

/* Lines next to each other, of which `readable` follow; their numbers are `stride` bytes apart. */
INLINE void pack_columns(const char *from, i64 stride, i64 lines, i64 readable, i64 numbers, u32 *to, const int panel,
                         const int half) {
  const i64 in_word = half ? 2 : 1;
  const int whole = lines == panel && readable >= (panel + 15) / 16 * 16;
  for (i64 at = 0; at < numbers; at += in_word, to += panel) {
    const char *one = from + at * stride, *other = one + stride;
    const int single = half && at + 1 == numbers; /* the other is 0 */
    if (whole && !single) {
      for (int i = 0; i < panel; i += 16)
        *(word_line *)(to + i) = !half ? load(one + 4 * i)
                                       : __builtin_convertvector(*(const half_line *)(one + 2 * i), words) |
                                             __builtin_convertvector(*(const half_line *)(other + 2 * i), words) << 16;
      continue;
    }
    for (int i = 0; i < panel; i++) {
      if (i >= lines) to[i] = 0u;
      else if (!half) to[i] = ((const word *)one)[i];
      else to[i] = ((const u16 *)one)[i] | (single ? 0u : (u32)((const u16 *)other)[i] << 16);
    }
  }
}

/* ---- A tile of sums */

/* A broadcast and its products are one statement: the compiler would have twelve ahead, and not the registers. */
#define MULTIPLY(name, instruction)                                                                 \
  static __attribute__((noinline)) void multiply_##name(const u32 *left, const u32 *right, i64 steps, Tile to) { \
    Tile sums;                                                                                      \
    UNROLLED for (int i = 0; i < HIGH; i++) sums[i][0] = sums[i][1] = (floats){0};                  \
    for (i64 step = 0; step < steps; step++, left += HIGH, right += WIDE) {                         \
      const words first = load(right), second = load(right + 16);                                   \
      UNROLLED for (int i = 0; i < HIGH; i++) {                                                     \
        words one;                                                                                  \
        __asm__("vbroadcastss %3, %2\n\t" instruction " %4, %2, %0\n\t" instruction " %5, %2, %1"   \
                : "+v"(sums[i][0]), "+v"(sums[i][1]), "=&v"(one)                                    \
                : "m"(left[i]), "v"(first), "v"(second));                                           \
      }                                                                                             \
    }                                                                                               \
    UNROLLED for (int i = 0; i < HIGH; i++) to[i][0] += sums[i][0], to[i][1] += sums[i][1];         \
  }

MULTIPLY(fp32, "vfmadd231ps")

/* With AMX a library multiplies several times as fast. */
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define WITH_BF16
MULTIPLY(bf16, "vdpbf16ps")

INLINE halves rounded(floats sums) {
  halves result;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(sums));
  return result;
}
#else
#define multiply_bf16 multiply_fp32
INLINE halves rounded(floats sums) { return (halves){(u16)sums[0]}; }
#endif

/* to, stride: of the result, in bytes */
INLINE void finish(const Product *of, char *to, i64 stride, i64 lines, i64 columns, Tile sums, const int half) {
  for (i64 i = 0; i < lines; i++, to += stride) {
    halves narrow[2];
    for (int j = 0; half && j < 2; j++) {
      narrow[j] = rounded(sums[i][j]);
      if (of->rounds) sums[i][j] = (floats)(__builtin_convertvector(narrow[j], words) << 16);
    }
    if (columns == WIDE) {
      for (int j = 0; j < 2; j++) {
        if (of->adds) ((float_line *)to)[j] += sums[i][j];
        else if (half) ((half_line *)to)[j] = narrow[j];
        else ((float_line *)to)[j] = sums[i][j];
      }
      continue;
    }
    for (i64 c = 0; c < columns; c++) {
      if (of->adds) ((float *)to)[c] += ((const float *)sums[i])[c];
      else if (half) ((u16 *)to)[c] = ((const u16 *)narrow)[c];
      else ((float *)to)[c] = ((const float *)sums[i])[c];
    }
  }
}

/* ---- A block of a group's result: lines from `top` to `bottom`, columns from `begin` to `end` */

INLINE void block(const Product *of, i64 group, i64 top, i64 bottom, i64 begin, i64 end, char *room, const int half) {
  const i64 size = half ? 2 : 4, in_word = half ? 2 : 1, at_once = half ? STEPS : FP32_STEPS;
  const i64 start = group ? of->ends[group - 1] : 0, rows = of->ends[group] - start;
  const i64 terms = of->over_rows ? rows : of->depth, pass = STEPS * in_word;
  const i64 left_stride = of->left_stride * size, right_stride = of->right_stride * size;
  const char *left = of->left + start * left_stride;
  const char *right = of->right + (of->over_rows ? start * right_stride : group * of->right_group * size);
  const i64 result_size = of->adds ? 4 : size, stride = of->width * result_size;
  char *result = of->result + (of->over_rows ? group * of->height : start) * stride;
  u32 *panels = (u32 *)room, *panel = (u32 *)(room + PANELS);
  i64 from = 0;
  do {
    const i64 numbers = least(pass, terms - from), steps = (numbers + in_word - 1) / in_word;
    for (i64 line = top, tile = 0; line < bottom; line += HIGH, tile++) {
      const i64 lines = least(HIGH, bottom - line);
      u32 *to = panels + tile * steps * HIGH;
      if (of->over_rows)
        pack_columns(left + from * left_stride + line * size, left_stride, lines, of->height - line, numbers, to, HIGH,
                     half);
      else pack_lines(left + line * left_stride + from * size, left_stride, lines, steps, to, HIGH);
    }
    Tile *sums = (Tile *)(room + PANELS + PANEL);
    for (i64 column = begin; column < end; column += WIDE) {
      const i64 columns = least(WIDE, end - column);
      if (of->transposed)
        pack_lines(right + column * right_stride + from * size, right_stride, columns, steps, panel, WIDE);
      else
        pack_columns(right + from * right_stride + column * size, right_stride, columns, of->width - column, numbers,
                     panel, WIDE, half);
      for (i64 line = top, tile = 0; line < bottom; line += HIGH, tile++) {
        for (int i = 0; from == 0 && i < HIGH; i++) (*sums)[i][0] = (*sums)[i][1] = (floats){0};
        for (i64 step = 0; step < steps; step += at_once)
          (half ? multiply_bf16 : multiply_fp32)(panels + (tile * steps + step) * HIGH, panel + step * WIDE,
                                                 least(at_once, steps - step), *sums);
        if (from + pass >= terms)
          finish(of, result + line * stride + column * result_size, stride, least(HIGH, bottom - line), columns, *sums,
                 half);
        if (terms > pass) sums++;
      }
    }
    from += pass;
  } while (from < terms);
}

/* ---- Blocks among threads, each of which takes the next one. */

static inline i64 pieces(i64 total, i64 size) { return (total + size - 1) / size; }

static inline i64 lines_of(const Product *of, i64 group) {
  const i64 rows = of->ends[group] - (group ? of->ends[group - 1] : 0);
  if (!of->over_rows) return rows;
  return rows == 0 && of->adds ? 0 : of->height;
}

INLINE void blocks(Product *of, int thread, const int half) {
  const i64 across = pieces(of->width, of->columns);
  i64 group = 0, before = 0; /* the blocks before the group's */
  for (;;) {
    const i64 mine = __atomic_fetch_add(&of->next, 1, __ATOMIC_RELAXED);
    for (; group < of->groups; group++) {
      const i64 here = pieces(lines_of(of, group), LINES) * across;
      if (mine < before + here) break;
      before += here;
    }
    if (group == of->groups) return;
    const i64 lines = lines_of(of, group), high = pieces(pieces(lines, pieces(lines, LINES)), HIGH) * HIGH;
    const i64 top = (mine - before) / across * high, begin = (mine - before) % across * of->columns;
    block(of, group, top, least(lines, top + high), begin, least(of->width, begin + of->columns),
          of->room + thread * product_room, half);
  }
}

extern int omp_get_thread_num(void);

/* Return whether the groups' ends are in order and within the rows; nothing is computed where they are not. */
INLINE int product(Product *of, const int half) {
  i64 high = 0, last = 0;
  for (i64 group = 0; group < of->groups; group++) {
    if (of->ends[group] < last || of->ends[group] > of->rows) return 0;
    last = of->ends[group];
    high += pieces(lines_of(of, group), LINES);
  }
  of->next = 0;
  of->columns = COLUMNS;
  while (of->columns > WIDE && high * pieces(of->width, of->columns) < 8 * of->threads) of->columns /= 2;
  if (of->threads <= 1) {
    blocks(of, 0, half);
  } else {
    _Pragma("omp parallel num_threads(of->threads)") blocks(of, omp_get_thread_num(), half);
  }
  return 1;
}

int grouped_product_fp32(Product *of) { return product(of, 0); }

#ifdef WITH_BF16
int grouped_product_bf16(Product *of) { return product(of, 1); }
#endif

#endif
