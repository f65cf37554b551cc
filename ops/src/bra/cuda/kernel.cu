// Bi-level routing attention: routing.cuh chooses regions, attention.cuh attends to them; in bf16 gathered.cuh does, for
// the head sizes that it supports, masked.cuh on small maps, and single.cuh if each query attends to one region.

#include "attention.cuh"
#include "gathered.cuh"
#include "masked.cuh"
#include "routing.cuh"
#include "single.cuh"
