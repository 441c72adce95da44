/* SPDX-License-Identifier: Apache-2.0 */
// exp, log and tanh in double, to within 4 ulp: the library needs no libm.
#ifndef ATTN_HOST_MATH_H
#define ATTN_HOST_MATH_H

double attn_exp(double x);
double attn_log(double x);
double attn_tanh(double x);

#endif
