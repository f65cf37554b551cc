// Bi-level routing attention: routing.cuh chooses regions, attention.cuh attends to them; in bf16 tensor_cores.cuh
// does, for the head sizes that it supports, and masked.cuh on small maps.

#include "attention.cuh"
#include "masked.cuh"
#include "routing.cuh"
#include "tensor_cores.cuh"
