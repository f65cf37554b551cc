//! The fused routed attention against the composed one, in f64: results and all gradients.

use autograd::gradcheck::{Function, backward, difference, relative_error, value};
use autograd::{Result, Tape, Var};
use ops::bra::reference;
use ops::case::{array, from_fn, uniform};
use ops::{Bra, RouteKind, bra, bra_composed};
use proptest::prelude::*;
use tensor::cpu::isa::{Isa, limits};
use tensor::{DType, Error, Tensor};

const TOLERANCE: f64 = 1e-12;

struct Form {
    attributes: Bra,
    fused: bool,
}

impl Function for Form {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let lepe = Some([&x[1], &x[2]]);
        Ok(match self.fused {
            true => bra(&x[0], lepe, &self.attributes)?.out,
            false => bra_composed(&x[0], lepe, &self.attributes, RouteKind::Hard)?.out,
        })
    }
}

/// Compares both forms on a map, and gives back the routes.
fn compare(qkv: &Tensor, attributes: Bra) -> Vec<u32> {
    let v_dim = qkv.shape()[3] - 2 * attributes.qk_dim;
    let inputs = [qkv.clone(), uniform([v_dim, 1, 5, 5], 2), uniform([v_dim], 3)];
    let (fused, composed) = (Form { attributes, fused: true }, Form { attributes, fused: false });
    let [a, b] = [value(&fused, &inputs).unwrap(), value(&composed, &inputs).unwrap()];
    let close = |a: &Tensor, b: &Tensor, what: &str| {
        let error = relative_error(&a.to_vec::<f64>().unwrap(), &b.to_vec::<f64>().unwrap());
        assert!(error <= TOLERANCE, "{what} of {attributes:?}: relative error {error:.1e}");
    };
    close(&a, &b, "result");
    let upstream = uniform(a.shape().clone(), 4);
    let [a, b] = [&fused, &composed].map(|form| backward(form, &inputs, &upstream).unwrap());
    for (input, name) in ["gradient of qkv", "gradient of the weight", "gradient of the bias"].iter().enumerate() {
        close(a[input].as_ref().unwrap(), b[input].as_ref().unwrap(), name);
    }
    ops::route(qkv, &attributes).unwrap().routes.to_vec().unwrap()
}

fn attributes(heads: usize, head_dim: usize, grid: [usize; 2], topk: usize) -> Bra {
    let qk_dim = heads * head_dim;
    Bra { heads, qk_dim, topk, grid, scale: (qk_dim as f64).powf(-0.5), valid: None }
}

#[test]
fn a_map_without_tokens_is_refused() {
    for extents in [[1, 0, 4, 36], [1, 4, 0, 36], [1, 0, 0, 36]] {
        let qkv = Tensor::zeros(extents, DType::F64);
        let attributes = attributes(2, 6, [2, 2], 1);
        let refused = ops::route(&qkv, &attributes).unwrap_err();
        assert!(matches!(refused, Error::Argument { op: "bra", .. }), "{refused}");
        let tape = Tape::new();
        assert!(bra(&tape.input(qkv), None, &attributes).is_err());
    }
}

#[test]
fn every_k_from_one_to_all_regions() {
    let qkv = uniform([2, 6, 9, 36], 1);
    for topk in 1..=9 {
        compare(&qkv, attributes(3, 4, [3, 3], topk));
    }
}

#[test]
fn every_way_through_the_registers_on_every_instruction_set() {
    for limited in limits(&Isa::SIMD) {
        let isa = limited.isa();
        for (map, grid, topk, [heads, dim]) in [
            ([16, 16], [4, 4], 4, [2, 24]), // 16 queries fill a register
            ([8, 8], [4, 4], 8, [1, 24]),   // 4 queries do not, 32 keys do
            ([6, 6], [3, 3], 3, [1, 7]),    // 12 keys neither, nor the channels
            ([7, 7], [1, 1], 1, [2, 32]),   // 49 of both
            ([9, 10], [1, 1], 1, [1, 5]),   // more than a block, the last of 26
        ] {
            let attributes = attributes(heads, dim, grid, topk);
            let qkv = uniform([2, map[0], map[1], 3 * heads * dim], 1);
            compare(&qkv, attributes);
            let inputs = [qkv, uniform([heads * dim, 1, 5, 5], 2), uniform([heads * dim], 3)];
            let upstream = uniform([2, map[0], map[1], heads * dim], 4);
            let [single, double] = [DType::F32, DType::F64].map(|dtype| {
                let inputs = inputs.each_ref().map(|input| input.cast(dtype).unwrap());
                let form = Form { attributes, fused: true };
                let gradients = backward(&form, &inputs, &upstream.cast(dtype).unwrap()).unwrap();
                let results = [Some(value(&form, &inputs).unwrap())].into_iter().chain(gradients);
                results.map(|x| x.unwrap().cast(DType::F64).unwrap().to_vec::<f64>().unwrap()).collect::<Vec<_>>()
            });
            for (single, double) in single.iter().zip(&double) {
                let error = relative_error(single, double);
                assert!(error <= 1e-5, "{isa:?}, {attributes:?}: relative error {error:.1e}");
            }
        }
    }
}

#[test]
fn zero_padding_at_the_bottom_and_right() {
    // As auto_pad makes it: rows and columns of equal tokens, whole regions of them among them.
    let qkv = uniform([1, 8, 8, 24], 1);
    let values = qkv.to_vec::<f64>().unwrap();
    let padded = |i: usize| i / 24 / 8 >= 5 || i / 24 % 8 >= 3;
    compare(
        &from_fn([1, 8, 8, 24], |i| if padded(i) { (i % 24) as f64 / 24.0 } else { values[i] }),
        attributes(2, 4, [4, 4], 5),
    );
}

#[test]
fn skewed_routing_where_all_regions_choose_the_same_one() {
    let qkv = uniform([1, 8, 8, 24], 1);
    let mut values = qkv.to_vec::<f64>().unwrap();
    for (pixel, token) in values.chunks_mut(24).enumerate() {
        token[0] = 3.0;
        let last_region = pixel / 8 >= 6 && pixel % 8 >= 6;
        token[8] = if last_region { 50.0 } else { 0.0 };
    }
    let routes = compare(&Tensor::from_slice(&values, [1, 8, 8, 24]).unwrap(), attributes(2, 4, [4, 4], 1));
    assert_eq!(routes, [15; 16]);
}

/// Of which the affinities are computed a block at a time.
#[test]
fn many_regions_are_routed_as_defined() {
    let (qkv, attributes) = (uniform([1, 9, 18, 24], 1), attributes(2, 4, [9, 9], 5));
    let defined = reference::routes(&array(&qkv), 0, &attributes, RouteKind::Hard).concat();
    assert_eq!(compare(&qkv, attributes), defined.iter().map(|&(region, _)| region as u32).collect::<Vec<_>>());
}

/// Forward, a head of many tokens is cut into shares, which lay out the keys that they need by themselves.
#[test]
fn shares_of_a_head() {
    compare(&uniform([1, 36, 36, 96], 1), attributes(1, 32, [3, 3], 9)); // a region each
    compare(&uniform([1, 28, 28, 96], 1), attributes(1, 32, [7, 7], 16)); // 49 regions in three shares
}

/// Rounded logarithms of large sums are wrong by as much as scores are large, and the weights are computed from them
/// again. What comes of it must not exceed what comes of rounded scores, which no form can avoid.
#[test]
fn gradients_of_large_scores_in_f32_are_as_exact_as_the_composed_forms() {
    for limited in limits(&Isa::SIMD) {
        for largest in [1.0, 50.0, 400.0, 2_500.0, 26_000.0] {
            let [fused, composed] = errors_in_f32(largest);
            let isa = limited.isa();
            assert!(
                fused < 1.5 * composed + 1e-6,
                "{isa:?}, scores up to {largest}: {fused:.1e}, composed {composed:.1e}"
            );
        }
    }
}

/// The relative errors of the fused form's gradient and of the composed one's, with scores up to `largest`.
fn errors_in_f32(largest: f64) -> [f64; 2] {
    let attributes = attributes(2, 16, [2, 2], 4);
    let (d, drawn) = (attributes.qk_dim, uniform([1, 10, 10, 3 * attributes.qk_dim], 1));
    let values: Vec<f32> = (drawn.to_vec::<f64>().unwrap().iter().enumerate())
        .map(|(place, x)| if place % (3 * d) < 2 * d { x * f64::sqrt(largest) } else { *x } as f32)
        .collect();
    let qkv = Tensor::from_slice(&values, drawn.shape().clone()).unwrap();
    let inputs = [qkv, uniform([d, 1, 5, 5], 2), uniform([d], 3)].map(|input| input.cast(DType::F32).unwrap());
    let upstream = uniform([1, 10, 10, d], 4).cast(DType::F32).unwrap();
    let gradient = |fused: bool, dtype: DType| -> Vec<f64> {
        let [qkv, weight, bias, upstream] =
            [&inputs[0], &inputs[1], &inputs[2], &upstream].map(|tensor| tensor.cast(dtype).unwrap());
        let dqkv = backward(&Form { attributes, fused }, &[qkv, weight, bias], &upstream).unwrap().swap_remove(0);
        dqkv.unwrap().cast(DType::F64).unwrap().to_vec().unwrap()
    };
    let exact = gradient(false, DType::F64);
    [true, false].map(|fused| relative_error(&gradient(fused, DType::F32), &exact))
}

#[test]
fn a_region_with_spoilt_keys_is_routed_as_documented() {
    let (regions, spoilt, topk) = (9, 4, 3);
    let attributes = attributes(1, 4, [3, 3], topk);
    for key in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut qkv = uniform([1, 6, 6, 12], 1).to_vec::<f64>().unwrap();
        for (i, x) in qkv.iter_mut().enumerate() {
            let (token, channel) = (i / 12, i % 12);
            let region = token / 6 / 2 * 3 + token % 6 / 2;
            // The mean queries of even regions are positive there, those of odd ones negative.
            match channel {
                0 => *x = if region % 2 == 0 { 1.0 } else { -1.0 },
                4 if region == spoilt => *x = key,
                _ => {}
            }
        }
        let qkv = Tensor::from_slice(&qkv, [1, 6, 6, 12]).unwrap();
        let routes = ops::route(&qkv, &attributes).unwrap().routes.to_vec::<u32>().unwrap();
        for (region, routes) in (0..regions).zip(routes.chunks(topk)) {
            let highest = key * if region % 2 == 0 { 1.0 } else { -1.0 } == f64::INFINITY;
            assert_eq!(routes.contains(&(spoilt as u32)), highest, "{key}, region {region}: {routes:?}");
            assert!(!highest || routes[0] == spoilt as u32);
        }
        let first = ops::route(&qkv, &Bra { topk: 1, ..attributes }).unwrap().routes.to_vec::<u32>().unwrap();
        assert_eq!(first, routes.iter().copied().step_by(topk).collect::<Vec<_>>());
        // With NaN, too, where all regions are taken.
        let all = Bra { topk: regions, ..attributes };
        let routes = ops::route(&qkv, &all).unwrap().routes.to_vec::<u32>().unwrap();
        assert!(routes.chunks(regions).all(|routes| routes.contains(&(spoilt as u32))));
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    let routes = compare(&from_fn([1, 4, 4, 12], |i| (i % 12) as f64 / 7.0), attributes(1, 4, [2, 2], 3));
    assert_eq!(routes, [[0, 1, 2]; 4].concat());
}

/// The composed form with the choice of regions learned.
struct Soft(Bra);

impl Function for Soft {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let lepe = if let [_, weight, bias] = x { Some([weight, bias]) } else { None };
        Ok(bra_composed(&x[0], lepe, &self.0, RouteKind::Soft)?.out)
    }
}

#[test]
fn soft_routing_has_the_value_of_its_definition() {
    let (qkv, attributes) = (uniform([2, 4, 6, 28], 1), attributes(2, 4, [2, 3], 3));
    let defined = reference::attention(&array(&qkv), &attributes, RouteKind::Soft);
    let error = relative_error(&array(&value(&Soft(attributes), &[qkv]).unwrap()).data, &defined.data);
    assert!(error <= TOLERANCE, "relative error {error:.1e}");
}

#[test]
fn soft_routing_has_the_gradient_of_its_differences() {
    // Regions well apart in their first channel, so that no small change alters a route.
    let qkv = uniform([1, 4, 6, 12], 1);
    let values = qkv.to_vec::<f64>().unwrap();
    let spread = |i: usize| match i % 12 {
        0 => 1.0,
        4 => (i / 12 / 12 * 3 + i / 12 % 6 / 2) as f64,
        _ => 0.0,
    };
    let qkv = from_fn([1, 4, 6, 12], |i| 0.3 * values[i] + spread(i));
    let inputs = [qkv, uniform([4, 1, 5, 5], 2), uniform([4], 3)];
    let soft = Soft(attributes(1, 4, [2, 3], 3));
    let output = value(&soft, &inputs).unwrap();
    let upstream = uniform(output.shape().clone(), 4);
    let weights = upstream.to_vec::<f64>().unwrap();
    let gradients = backward(&soft, &inputs, &upstream).unwrap();
    for (input, gradient) in gradients.iter().enumerate() {
        let gradient = gradient.as_ref().unwrap().to_vec::<f64>().unwrap();
        let differences: Vec<f64> =
            (0..gradient.len()).map(|element| difference(&soft, &inputs, &weights, input, element).unwrap()).collect();
        let error = relative_error(&gradient, &differences);
        assert!(error <= 1e-6, "input {input}: relative error {error:.1e}");
    }
    // And it differs from hard routing, whose gradient does not reach the choice.
    let hard = Form { attributes: soft.0, fused: false };
    let hard = backward(&hard, &inputs, &upstream).unwrap()[0].as_ref().unwrap().to_vec::<f64>().unwrap();
    assert!(relative_error(&gradients[0].as_ref().unwrap().to_vec::<f64>().unwrap(), &hard) > 1e-3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn odd_sizes(
        (n, gh, gw) in (1..3usize, 1..5usize, 1..4usize),
        (rh, rw) in (1..6usize, 1..4usize),
        (heads, d, dv) in (1..4usize, 1..6usize, 1..6usize),
        k in 0..100usize,
        stream in 10..1000u64,
    ) {
        let attributes = attributes(heads, d, [gh, gw], 1 + k % (gh * gw));
        compare(&uniform([n, gh * rh, gw * rw, heads * (2 * d + dv)], stream), attributes);
    }
}
