//! Every form of the kernels on tensor cores against the CPU in f64.

use super::*;
use crate::bra::cpu;
use crate::case::{indices, uniform};
use crate::{Bra, Regions};
use autograd::gradcheck::relative_error;
use standin::Standin;
use std::sync::Arc;
use tensor::Device;
use tensor::cpu::parallel;
use tensor::cuda::nvidia::compiler::version;

/// Regions of few and many tokens; one full tile of keys, a partly filled one, and several; queries in several chunks.
fn geometries(dim: usize) -> Vec<Geometry> {
    let geometry = |map, grid, topk, heads| {
        let (regions, channels) = (Regions::cut("test", map, grid).unwrap(), heads * dim);
        Geometry { images: 2, regions, heads, qk_dim: channels, v_dim: channels, topk }
    };
    vec![
        geometry([4, 6], [2, 3], 4, 2),
        geometry([3, 5], [3, 5], 7, 1),
        geometry([8, 8], [2, 2], 4, 1),
        geometry([7, 7], [1, 1], 1, 1),
        geometry([9, 10], [1, 1], 1, 1),
        geometry([6, 18], [1, 2], 2, 1),
        geometry([8, 24], [1, 3], 1, 2),
        geometry([15, 7], [3, 1], 1, 1),
        geometry([8, 6], [4, 6], 7, 1),
        geometry([8, 8], [4, 2], 2, 2),
        geometry([14, 14], [7, 7], 16, 1),
        geometry([14, 14], [7, 7], 20, 1),
        geometry([16, 16], [8, 8], 16, 1),
    ]
}

/// out and lse of a map in f64.
fn on_the_cpu(g: Geometry, qkv: &Tensor, routes: &Tensor, scale: f64) -> [Tensor; 2] {
    let mut out = Tensor::empty(g.shape(g.v_dim), DType::F64);
    let mut lse = Tensor::empty([g.images, g.heads, g.tokens()], DType::F64);
    let (qkv, routes) = (qkv.as_slice("test").unwrap(), routes.as_slice("test").unwrap());
    cpu::forward::<f64>(g, qkv, routes, scale, out.as_mut_slice("test").unwrap(), lse.as_mut_slice("test").unwrap());
    [out, lse]
}

#[test]
fn every_form_agrees_with_the_cpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    for dim in [24, 32, 64, 96] {
        for g in geometries(dim) {
            let scale = (g.qk_dim as f64).powf(-0.5);
            let qkv = uniform(g.shape(g.row()), 1).cast(DType::Bf16).unwrap();
            // Distinct regions: k neighbours of a random one.
            let first = indices([g.images * g.regions.count()], g.regions.count(), 2).to_vec::<u32>().unwrap();
            let routes =
                first.iter().flat_map(|&first| (0..g.topk as u32).map(move |i| (first + i) % g.regions.count() as u32));
            let routes: Vec<u32> = routes.collect();
            let routes = Tensor::from_slice(&routes, [g.images, g.regions.count(), g.topk]).unwrap();
            let wide = qkv.cast(DType::F64).unwrap();
            let [out, lse] = on_the_cpu(g, &wide, &routes, scale);
            let dout = uniform(out.shape().clone(), 3).cast(DType::Bf16).unwrap();
            let mut dqkv = Tensor::empty(qkv.shape().clone(), DType::F64);
            cpu::backward::<f64>(
                g,
                wide.as_slice("test").unwrap(),
                routes.as_slice("test").unwrap(),
                scale,
                lse.as_slice("test").unwrap(),
                dout.cast(DType::F64).unwrap().as_slice("test").unwrap(),
                parallel::Out::store(dqkv.as_mut_slice("test").unwrap()),
            );
            let there = |tensor: &Tensor| tensor.to_device(&device).unwrap();
            let (qkv, routes, dout) = (there(&qkv), there(&routes), there(&dout));
            let gathered = [false, true].map(|resident| Form::Gathered(Gathered { dim, resident }));
            let single = Single::of(g, dim).map(Form::Single);
            let masked = Masked { dim };
            let masked = (Masked::suits(g) && masked.fits(&gpu, g)).then_some(Form::Masked(masked));
            for form in gathered.into_iter().chain(single).chain(masked) {
                let empty = |like: &Tensor, dtype| Tensor::empty_on(&device, like.shape().clone(), dtype).unwrap();
                let (mut got, mut got_lse) = (empty(&out, DType::Bf16), empty(&lse, DType::F32));
                let mut attended = empty(&out, DType::Bf16);
                let (read, written) = ([&qkv, &routes], [&mut got, &mut got_lse]);
                match form {
                    Form::Gathered(gathered) => gathered.forward(g, read, scale, written).unwrap(),
                    Form::Masked(masked) => masked.forward(g, read, scale, written, Some(&mut attended)).unwrap(),
                    Form::Single(single) => single.forward(g, read, scale, written).unwrap(),
                }
                let mut got_dqkv = empty(&dqkv, DType::Bf16);
                let given = Given { qkv: &qkv, routes: &routes, scale, lse: &got_lse, attended: None, dout: &dout };
                for accumulate in [false, true] {
                    let place = got_dqkv.as_out("test", accumulate).unwrap();
                    match form {
                        Form::Gathered(gathered) => gathered.backward(g, &given, &place).unwrap(),
                        // On a GPU with less shared memory chunks are smaller.
                        Form::Masked(masked) if accumulate => {
                            masked.backward_in_chunks(64, g, &given, &attended, &place).unwrap();
                        }
                        Form::Masked(masked) => masked.backward(g, &given, &attended, &place).unwrap(),
                        Form::Single(single) => single.backward(g, &given, &place).unwrap(),
                    }
                    let times = if accumulate { 2.0 } else { 1.0 };
                    let expected: Vec<f64> = dqkv.to_vec::<f64>().unwrap().iter().map(|x| times * x).collect();
                    let error = |got: &Tensor, expected: &[f64]| {
                        relative_error(&got.cast(DType::F64).unwrap().to_vec::<f64>().unwrap(), expected)
                    };
                    let errors = [
                        error(&got, &out.to_vec::<f64>().unwrap()),
                        error(&got_lse, &lse.to_vec::<f64>().unwrap()),
                        error(&got_dqkv, &expected),
                    ];
                    let named = format!("{form:?}, {g:?}: {errors:?}");
                    assert!(errors[0] < 1e-2 && errors[1] < 1e-5 && errors[2] < 1e-2, "{named}");
                }
            }
        }
    }
}

/// Routes (N, P, k) from each region to itself and those after it.
fn following_regions(g: Geometry) -> Tensor {
    let regions = g.regions.count();
    let routes = (0..g.images * regions * g.topk).map(|i| ((i / g.topk + i % g.topk) % regions) as u32);
    Tensor::from_slice(&routes.collect::<Vec<_>>(), [g.images, regions, g.topk]).unwrap()
}

/// Rows whose largest scores are usual, and rows of the same tile for which exponentials of unshifted ones would
/// overflow, or all vanish; values that a weight above one would carry to infinity, and tiny ones.
#[test]
fn masked_attention_holds_for_scores_of_any_size() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let far = |n: i32| 2f64.powi(n);
    for dim in [24, 32] {
        let g = geometries(dim).remove(0);
        let scale = 0.2;
        let routes = following_regions(g);
        for [shift, spread, size] in [
            [0.0, 1.0, 1.0],
            [12.0, 1.0, far(110)],
            [17.0, 1.0, far(-75)],
            [40.0, 1.0, far(120)],
            [3000.0, 1.0, 1.0],
            [0.0, 100.0, 1.0],
            [40.0, far(40), far(120)],
        ] {
            let mut qkv = uniform(g.shape(g.row()), 1).to_vec::<f64>().unwrap();
            for (token, channels) in qkv.chunks_mut(g.row()).enumerate() {
                for (channel, x) in channels.iter_mut().enumerate() {
                    let [of_query, of_key] = [0, g.qk_dim].map(|begin| (begin..begin + g.qk_dim).contains(&channel));
                    // The first channel adds -shift, 0 or shift to all of a query's scores.
                    *x = match channel % dim {
                        0 if of_query => shift / scale * (token % 3) as f64 - shift / scale,
                        0 if of_key => 1.0,
                        _ if of_query => *x * spread,
                        _ if of_key => *x,
                        _ => *x * size,
                    };
                }
            }
            let qkv = Tensor::from_slice(&qkv, g.shape(g.row())).unwrap().cast(DType::Bf16).unwrap();
            let [out, lse] = on_the_cpu(g, &qkv.cast(DType::F64).unwrap(), &routes, scale);
            let empty = |like: &Tensor, dtype| Tensor::empty_on(&device, like.shape().clone(), dtype).unwrap();
            let (mut got, mut got_lse) = (empty(&out, DType::Bf16), empty(&lse, DType::F32));
            let read = [&qkv.to_device(&device).unwrap(), &routes.to_device(&device).unwrap()];
            Masked { dim }.forward(g, read, scale, [&mut got, &mut got_lse], None).unwrap();
            let named = format!("{dim} channels, {shift}, {spread}, {size}");
            let numbers = |of: &Tensor| of.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
            let error = relative_error(&numbers(&got), &numbers(&out));
            assert!(error < 1e-2, "{named}: {error}");
            for (got, expected) in numbers(&got_lse).iter().zip(numbers(&lse)) {
                assert!((got - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{named}: {got}, not {expected}");
            }
        }
    }
}

/// On misaligned maps the copies of the tensor-core kernels would fault, after which a GPU refuses all further work
/// from the process.
#[test]
fn maps_that_begin_between_packs_and_negative_scales_are_left_to_the_kernels_for_any() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let g = geometries(32).remove(0);
    let routes = following_regions(g).to_device(&device).unwrap();
    let [all, of_out] = [g.row(), g.v_dim].map(|channels| g.shape(channels));
    // The same numbers, starting `after` elements into an allocation.
    let map = |shape: [usize; 4], after: usize, stream| {
        let count = shape.iter().product::<usize>();
        let values = uniform([count], stream).to_vec::<f64>().unwrap();
        let values = [vec![0.0; after], values].concat();
        let whole = Tensor::from_slice(&values, [values.len()]).unwrap().cast(DType::Bf16).unwrap();
        let whole = whole.to_device(&device).unwrap();
        whole.slice(0, after..after + count).unwrap().reshape(shape).unwrap()
    };
    let attend = |after: [usize; 2]| {
        let (qkv, dout) = (map(all, after[0], 1), map(of_out, after[1], 3));
        let mut out = Tensor::empty_on(&device, of_out, DType::Bf16).unwrap();
        let mut lse = Tensor::empty_on(&device, [g.images, g.heads, g.tokens()], DType::F32).unwrap();
        let attended = forward(g, [&qkv, &routes], 0.2, [&mut out, &mut lse], true).unwrap();
        let mut dqkv = Tensor::empty_on(&device, all, DType::Bf16).unwrap();
        let attended = attended.as_ref();
        let given = Given { qkv: &qkv, routes: &routes, scale: 0.2, lse: &lse, attended, dout: &dout };
        backward(g, &given, &dqkv.as_out("test", false).unwrap()).unwrap();
        [out, dqkv].map(|result| result.cast(DType::F64).unwrap().to_vec::<f64>().unwrap())
    };
    let expected = attend([0, 0]);
    for after in [[1, 0], [0, 1]] {
        for (got, expected) in attend(after).iter().zip(&expected) {
            assert!(relative_error(got, expected) < 1e-2, "{after:?} elements between packs");
        }
    }
    let form = |scale, maps: &[u64]| Form::of(&gpu, g, DType::Bf16, scale, maps).is_some();
    assert!(form(0.2, &[512, 1024]) && !form(0.2, &[512, 1026]));
    assert!(!form(0.0, &[512, 1024]) && !form(-0.2, &[512, 1024]));
}

#[test]
fn the_form_for_single_regions_wants_more_than_half_a_tile_of_keys() {
    let suits = |side: usize, grid: usize, topk: usize| {
        let regions = Regions::cut("test", [side, side], [grid, grid]).unwrap();
        Single::of(Geometry { images: 1, regions, heads: 1, qk_dim: 32, v_dim: 32, topk }, 32).is_some()
    };
    assert!(suits(56, 7, 1) && suits(7, 1, 1) && suits(42, 7, 1));
    assert!(!suits(56, 7, 2) && !suits(63, 7, 1) && !suits(35, 7, 1) && !suits(8 << 14, 1 << 14, 1));
}

#[test]
fn keys_and_values_stay_in_shared_memory_where_they_fit_and_blocks_fill_the_gpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let resident = |side: usize, images: usize| {
        let regions = Regions::cut("test", [side, side], [7, 7]).unwrap();
        let g = Geometry { images, regions, heads: 1, qk_dim: 32, v_dim: 32, topk: 1 };
        Gathered::of(&gpu, g, 32).resident
    };
    let enough = gpu.properties().multiprocessors;
    assert!(resident(28, enough) && !resident(56, enough) && !resident(28, enough - 1));
}

/// Divides with `Divisor`, one divisor per thread, and counts the results that differ from `/` and `%`.
static DIVISIONS: Module = Module {
    name: "divisions",
    source: r#"
#include "geometry.cuh"
__global__ void divide(const u32* by, const u32* magic, u32* wrong) {
    const int d = by[threadIdx.x];
    const Divisor divisor(d, magic[threadIdx.x]);
    u32 count = 0;
    auto check = [&](i64 x) {
        if (x >= 0 && x <= 0x7fffffff) count += int(x) / divisor != x / d || int(x) % divisor != x % d;
    };
    for (int i = 0; i < 5000; i++) {
        check(i), check(0x7fffffff - i);
        for (int near = -1; near < 2; near++) check(i64(i) * d + near), check((0x7fffffff / d - i) * i64(d) + near);
    }
    wrong[threadIdx.x] = count;
}
"#,
    headers: &[("geometry.cuh", include_str!("geometry.cuh"))],
    kernels: &["divide"],
};

#[test]
fn quotients_are_exact() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    let near_powers = (1..31).flat_map(|bit| [(1u32 << bit) - 1, 1 << bit, (1 << bit) + 1]);
    let mut divisors: Vec<u32> = (1..=900).chain(near_powers).chain([i32::MAX as u32]).collect();
    divisors.resize(1024, 49);
    let magics: Vec<u32> = divisors.iter().map(|&by| magic(by as usize) as u32).collect();
    let there = |of: &[u32]| Tensor::from_slice(of, [1024]).unwrap().to_device(&device).unwrap();
    let mut wrong = Tensor::empty_on(&device, [1024], DType::Index).unwrap();
    let launch = DIVISIONS.launch(&gpu, "divide", DType::F32).unwrap().threads(1024).blocks(1);
    let (divisors, magics) = (there(&divisors), there(&magics));
    let launch = launch.input(&divisors).unwrap().input(&magics).unwrap().output(&mut wrong).unwrap();
    // SAFETY: a number in each of the three for each thread.
    unsafe { launch.run().unwrap() };
    assert_eq!(wrong.to_vec::<u32>().unwrap(), [0; 1024]);
}

#[test]
fn inverted_lists_are_in_order() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    for (grid, topk) in [([1, 1], 1), ([3, 3], 1), ([3, 3], 9), ([7, 7], 16), ([5, 8], 40)] {
        let regions = Regions::cut("test", grid, grid).unwrap();
        let g = Geometry { images: 3, regions, heads: 1, qk_dim: 1, v_dim: 1, topk };
        let regions = g.regions.count();
        // In the first image, the routes of all regions begin with the same region; in the others, with random ones.
        let first = indices([3 * regions], regions, 4).to_vec::<u32>().unwrap();
        let first = first.iter().enumerate().map(|(p, &first)| if p < regions { 0 } else { first as usize });
        let routes: Vec<u32> = first.flat_map(|r| (0..topk).map(move |i| ((r + i) % regions) as u32)).collect();
        let (mut starts, mut entries) = (vec![], vec![]);
        for image in routes.chunks(regions * topk) {
            let before = entries.len();
            for region in 0..regions as u32 {
                starts.push((entries.len() - before) as u32);
                let of_region = image.iter().enumerate().filter(|&(_, &route)| route == region);
                entries.extend(of_region.map(|(i, _)| (i / topk) as u32));
            }
            starts.push((entries.len() - before) as u32);
        }
        let routes = Tensor::from_slice(&routes, [3, regions, topk]).unwrap().to_device(&device).unwrap();
        let [got_starts, got_entries] = invert(g, &routes).unwrap();
        assert_eq!(got_starts.to_vec::<u32>().unwrap(), starts, "{g:?}");
        assert_eq!(got_entries.to_vec::<u32>().unwrap(), entries, "{g:?}");
    }
}

/// With regions that take several blocks, and with a whole image per block; the last regions are only partly valid.
#[test]
fn routes_are_those_of_the_cpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    for (grid, qk_dim) in [([7, 7], 7), ([9, 11], 7), ([9, 11], 8), ([7, 7], 8)] {
        let valid = Some([2 * grid[0] - 1, grid[1]]);
        let attributes = Bra { heads: 1, qk_dim, topk: 5, grid, scale: 0.3, valid };
        let qkv = uniform([3, 2 * grid[0], grid[1], 3 * qk_dim], 1);
        let [here, there] =
            [qkv.clone(), qkv.to_device(&device).unwrap()].map(|qkv| crate::route(&qkv, &attributes).unwrap());
        assert_eq!(there.routes.to_vec::<u32>().unwrap(), here.routes.to_vec::<u32>().unwrap(), "{attributes:?}");
        let [here, there] = [here, there].map(|routing| routing.affinities.to_vec::<f64>().unwrap());
        assert!(relative_error(&there, &here) < 1e-12, "{attributes:?}");
    }
}

/// More regions than a tile of `choose_regions`, more channels than a chunk of them; ties, infinities and NaN.
#[test]
fn regions_are_chosen_in_order() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(gpu);
    for (grid, qk_dim, topk) in [([1, 1], 3, 1), ([7, 7], 40, 16), ([9, 11], 6, 99)] {
        let regions = Regions::cut("test", grid, grid).unwrap();
        let g = Geometry { images: 2, regions, heads: 1, qk_dim, v_dim: 4, topk };
        let regions = g.regions.count();
        // Of each query and key only one channel is not zero; keys come from few values, so that most tie.
        let values = [2.0, f32::NAN, -1.0, f32::NEG_INFINITY, 0.5, 2.0, -1.0];
        let key = |image: usize, region: usize| values[(region * 3 + image) % 7];
        let mut qkv = vec![0.0; g.images * regions * g.row()];
        for (token, channels) in qkv.chunks_mut(g.row()).enumerate() {
            channels[qk_dim - 1] = 1.0;
            channels[2 * qk_dim - 1] = key(token / regions, token % regions);
        }
        let qkv = Tensor::from_slice(&qkv, [2, grid[0], grid[1], g.row()]).unwrap().to_device(&device).unwrap();
        let mut routes = Tensor::empty_on(&device, [2, regions, topk], DType::Index).unwrap();
        let mut affinities = Tensor::empty_on(&device, [2, regions, topk], DType::F32).unwrap();
        route(g, grid, 1.0, &qkv, [&mut routes, &mut affinities]).unwrap();
        let (routes, affinities) = (routes.to_vec::<u32>().unwrap(), affinities.to_vec::<f32>().unwrap());
        for (row, (routes, affinities)) in routes.chunks(topk).zip(affinities.chunks(topk)).enumerate() {
            let of = |region: usize| key(row / regions, region);
            let mut expected: Vec<usize> = (0..regions).collect();
            expected.sort_by(|&a, &b| of(a).is_nan().cmp(&of(b).is_nan()).then(of(b).total_cmp(&of(a))));
            for ((&expected, &route), &affinity) in expected.iter().zip(routes).zip(affinities) {
                assert_eq!(route as usize, expected, "{g:?}, {row}");
                assert!(affinity == of(expected) || of(expected).is_nan() && affinity.is_nan());
            }
        }
    }
}

#[test]
fn in_ptx() {
    Standin::in_ptx(version()).into_iter().for_each(|standin| _ = standin.repeat(&["bra::cuda"], &[]));
}
