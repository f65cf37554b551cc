//! Every form of the kernels on tensor cores against the CPU in f64.

use super::*;
use crate::bra::cpu;
use crate::case::{indices, uniform};
use autograd::gradcheck::relative_error;
use tensor::Device;
use tensor::cpu::parallel;

/// Regions of few and many tokens; tiles of keys that are full, begun, and several; queries in several chunks.
fn geometries(dim: usize) -> Vec<Geometry> {
    let geometry = |map, grid, topk, heads| {
        let channels = heads * dim;
        Geometry { images: 2, map, grid, heads, qk_dim: channels, v_dim: channels, topk }
    };
    vec![
        geometry([4, 6], [2, 3], 4, 2),
        geometry([3, 5], [3, 5], 7, 1),
        geometry([8, 8], [2, 2], 4, 1),
        geometry([7, 7], [1, 1], 1, 1),
        geometry([9, 10], [1, 1], 1, 1),
        geometry([6, 18], [1, 2], 2, 1),
    ]
}

#[test]
fn every_form_agrees_with_the_cpu() {
    let Some(gpu) = Gpu::for_tests(11) else { return };
    let device = Device::Cuda(Arc::clone(&gpu));
    for dim in [32, 64, 96] {
        for g in geometries(dim) {
            let scale = (g.qk_dim as f64).powf(-0.5);
            let map = [g.images, g.map[0], g.map[1]];
            let qkv = uniform([map[0], map[1], map[2], g.row()], 1).cast(DType::Bf16).unwrap();
            // Distinct regions: k neighbours of a random one.
            let first = indices([g.images * g.regions()], g.regions(), 2).to_vec::<u32>().unwrap();
            let routes =
                first.iter().flat_map(|&first| (0..g.topk as u32).map(move |i| (first + i) % g.regions() as u32));
            let routes: Vec<u32> = routes.collect();
            let routes = Tensor::from_slice(&routes, [g.images, g.regions(), g.topk]).unwrap();
            let wide = qkv.cast(DType::F64).unwrap();
            let mut out = Tensor::empty([map[0], map[1], map[2], g.v_dim], DType::F64);
            let mut lse = Tensor::empty([g.images, g.heads, g.tokens()], DType::F64);
            cpu::forward::<f64>(
                g,
                wide.as_slice("test").unwrap(),
                routes.as_slice("test").unwrap(),
                scale,
                out.as_mut_slice("test").unwrap(),
                lse.as_mut_slice("test").unwrap(),
            );
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
            let (starts, entries) = invert(&gpu, &device, g, &routes).unwrap();
            for (groups, resident) in [(1, false), (1, true), (2, false), (2, true)] {
                let form = Form { dim, groups, resident };
                let empty = |like: &Tensor, dtype| Tensor::empty_on(&device, like.shape().clone(), dtype).unwrap();
                let (mut got, mut got_lse) = (empty(&out, DType::Bf16), empty(&lse, DType::F32));
                form.forward(&gpu, g, [&qkv, &routes], scale, [&mut got, &mut got_lse]).unwrap();
                let (mut got_dqkv, mut delta) = (empty(&dqkv, DType::Bf16), empty(&lse, DType::F32));
                let given = Given { qkv: &qkv, routes: &routes, scale, lse: &got_lse, dout: &dout };
                for accumulate in [false, true] {
                    let place = got_dqkv.as_out("test", accumulate).unwrap();
                    form.backward_queries(&gpu, g, &given, &place, &mut delta).unwrap();
                    form.backward_keys(&gpu, g, &given, [&starts, &entries, &delta], &place).unwrap();
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
                    let named = format!("{dim} channels, {groups} groups, resident {resident}, {g:?}: {errors:?}");
                    assert!(errors[0] < 1e-2 && errors[1] < 1e-5 && errors[2] < 1e-2, "{named}");
                }
            }
        }
    }
}
