/* The inner loops of a mask, with the same bits as the numpy code of crypto.mask.

   Each sum has the operands and the order that crypto/mask/hadamard.py gives it, so IEEE 754 fixes its bits. The compiler must not
   contract or reorder them: see the options in setup.py. crypto/mask/kernel.py compares all functions with numpy before it uses them. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 64, PASS_BITS = 6, PASS_ROWS = 1 << PASS_BITS, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* `bits` butterflies over the rows of a tile of `width` columns, neighbours first. GCC adds number by number where it unrolls the
   innermost loop as a whole, as it does up to 16 columns, so their number is no constant. */
static void butterflies(float tile[][WIDTH], int bits, int width)
{
    int rows = 1 << bits;
    for (int half = 1; half < rows; half *= 2)
        for (int first = 0; first < rows; first += 2 * half)
            for (int row = first; row < first + half; row++) {
                float *restrict a = tile[row], *restrict b = tile[row + half];
                for (int i = 0; i < width; i++) {
                    float sum = a[i] + b[i], difference = a[i] - b[i];
                    a[i] = sum;
                    b[i] = difference;
                }
            }
}

/* One pass over `1 << bits` rows that lie `stride` apart, each `width` coordinates wide; `before` and `after` are factors. */
static void pass(float *vector, int64_t stride, int64_t width, int bits, float before, float after)
{
    float tile[PASS_ROWS][WIDTH];
    int rows = 1 << bits;
    for (int64_t at = 0; at < width; at += WIDTH) {
        int here = width - at < WIDTH ? (int)(width - at) : WIDTH;
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < here; i++)
                tile[row][i] = vector[row * stride + at + i] * before;
        butterflies(tile, bits, here);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < here; i++)
                vector[row * stride + at + i] = tile[row][i] * after;
    }
}

/* `_blocks` of crypto/mask/hadamard.py: the columns of `count` coordinates, read as `1 << bits` rows. */
void shoal_blocks(float *vector, int64_t count, int32_t bits, float scale)
{
    int low = bits < PASS_BITS ? bits : PASS_BITS, high = bits - low;
    int64_t row = count >> bits, group = row << low;
    for (int64_t start = 0; start < count; start += group)
        pass(vector + start, row, row, low, 1.0f, high ? 1.0f : scale);
    if (high)
        pass(vector, group, group, high, scale, 1.0f);
}

/* Turns the sizes of groups into their places. */
static void add_up(uint32_t *place)
{
    uint32_t next = 0;
    for (int digit = 0; digit < DIGITS; digit++) {
        uint32_t size = place[digit];
        place[digit] = next;
        next += size;
    }
}

/* `_sorted` of crypto/mask/stream.py: the places of `count` coordinates by (high, low), equal ones ascending; 0, or 1 without memory. */
int32_t shoal_sorted(const uint16_t *low, const uint16_t *high, int32_t *order, int64_t count)
{
    uint64_t *both = malloc(2 * (size_t)count * sizeof *both);
    if (!both)
        return 1;
    uint64_t *first = both, *second = both + count;
    uint32_t place[3][DIGITS] = {{0}};
    for (int64_t i = 0; i < count; i++) {
        uint32_t number = (uint32_t)high[i] << 16 | low[i];
        place[0][number & (DIGITS - 1)]++;
        place[1][number >> DIGIT_BITS & (DIGITS - 1)]++;
        place[2][number >> 2 * DIGIT_BITS]++;
    }
    for (int digit = 0; digit < 3; digit++)
        add_up(place[digit]);
    for (int64_t i = 0; i < count; i++) {
        uint64_t number = (uint64_t)high[i] << 16 | low[i];
        first[place[0][number & (DIGITS - 1)]++] = number << 32 | (uint64_t)i;
    }
    for (int64_t i = 0; i < count; i++)
        second[place[1][first[i] >> (32 + DIGIT_BITS) & (DIGITS - 1)]++] = first[i];
    for (int64_t i = 0; i < count; i++)
        order[place[2][second[i] >> (32 + 2 * DIGIT_BITS)]++] = (int32_t)second[i];
    memset(both, 0, 2 * (size_t)count * sizeof *both);
    free(both);
    return 0;
}
