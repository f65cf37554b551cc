// Bi-level routing attention: routing.cuh chooses regions, attention.cuh attends to them.

#include "attention.cuh"
#include "routing.cuh"
