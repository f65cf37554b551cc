//! `biformer bench --op bra`: how the time and the memory of attention grow with the map.
//!
//! Bi-level routing attention over H·W tokens and S² regions computes S⁴ affinities of regions, and k·H·W/S² scores
//! for each of the H·W queries. The S that makes the sum of both least grows as (H·W)^(1/3) (equation 9 of the
//! paper), and the sum then as (H·W)^(4/3); full attention grows as (H·W)².

use super::noise;
use crate::commands::Status;
use crate::commands::output::{Kind, ensure_output};
use crate::pictures::scaling;
use anyhow::{Result, bail};
use autograd::{Gradients, Tape, Var};
use ops::{Bra, attention, bra};
use serde::Serialize;
use serde_json::json;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;
use tensor::cpu::isa::Isa;
use tensor::{Tensor, pool_stats, reset_peak, trim_pool};

const CHANNELS: usize = 64;
const HEADS: usize = 2;
/// k, as in the published models' second stage.
const TOPK: usize = 4;
/// The side of the smallest map; each of the others is twice the one before.
const SMALLEST: usize = 28;
/// A map that might take longer than this many seconds, forward and backward, is left out: see [`GROWTH`].
const PATIENCE: f64 = 10.0;
/// Four times the tokens take at most so many times as long: sixteen for the arithmetic of full attention, and up to
/// four for keys and values that no longer fit into a cache.
const GROWTH: f64 = 64.0;

/// What was measured on one square map.
#[derive(Clone, Debug, Serialize)]
struct Point {
    tokens: usize,
    /// S: regions along each side.
    regions_per_side: usize,
    keys_per_query: usize,
    forward_ms: f64,
    forward_backward_ms: f64,
    /// The most memory beyond queries, keys, values, result and their gradients.
    extra_bytes: usize,
}

/// One kind of attention on maps of growing size.
#[derive(Clone, Debug, Serialize)]
struct Curve {
    attention: &'static str,
    points: Vec<Point>,
    /// The exponent e of time ~ tokens^e, by a least-squares fit to the logarithms; none for a single point.
    forward_exponent: Option<f64>,
    forward_backward_exponent: Option<f64>,
    /// The same of the extra memory.
    extra_bytes_exponent: Option<f64>,
}

/// Sweeps the maps up to a side of `largest` on the thread pool that it is called on; draws the curves if there is
/// a file to draw them to.
pub fn run(largest: usize, plot: Option<&Path>, json: bool) -> Result<Status> {
    if !(2 * SMALLEST..=32 * SMALLEST).contains(&largest) {
        bail!("--largest {largest}: expected {} to {}", 2 * SMALLEST, 32 * SMALLEST);
    }
    ensure_output("--plot", plot, Kind::Picture)?;
    let routed = Curve::measure("bra", largest, regions_per_side, |regions, qkv| {
        let grid = [regions; 2];
        let scale = (CHANNELS as f64).powf(-0.5);
        Ok(bra(qkv, None, &Bra { heads: HEADS, qk_dim: CHANNELS, topk: TOPK, grid, scale, valid: None })?.out)
    })?;
    let full = Curve::measure(
        "attention",
        largest,
        |_| 1,
        |_, qkv| attention(qkv, HEADS, ((CHANNELS / HEADS) as f64).powf(-0.5)),
    )?;
    let (threads, isa) = (rayon::current_num_threads(), Isa::current().name());
    let setting = format!("{CHANNELS} channels, {HEADS} heads, k = {TOPK}, f32, threads: {threads}, {isa}");
    let curves = [routed, full];
    if json {
        let object = json!({
            "channels": CHANNELS, "heads": HEADS, "topk": TOPK, "threads": threads, "isa": isa, "curves": curves,
        });
        say!("{object}");
    } else {
        say!("{setting}");
        for curve in &curves {
            curve.print()?;
        }
    }
    // Last, as it may fail, and measuring takes minutes.
    if let Some(path) = plot {
        let growth = |curve: &Curve, name| scaling::Growth {
            name,
            points: curve.points.iter().map(|point| (point.tokens as f64, point.forward_backward_ms / 1e3)).collect(),
            exponent: curve.forward_backward_exponent,
        };
        let [routed, full] = &curves;
        scaling::draw([growth(routed, "bi-level routing attention"), growth(full, "full attention")], &setting, path)?;
    }
    Ok(Status::Done)
}

/// The divisor of the side that is closest to the S of equation 9, (k/2·(H·W)²)^(1/6).
fn regions_per_side(side: usize) -> usize {
    let wanted = (TOPK as f64 / 2.0).powf(1.0 / 6.0) * (side as f64).powf(2.0 / 3.0);
    let divisors = (1..=side).filter(|&divisor| side.is_multiple_of(divisor));
    divisors.min_by(|&a, &b| (a as f64 - wanted).abs().total_cmp(&(b as f64 - wanted).abs())).unwrap_or(1)
}

impl Curve {
    fn measure(
        name: &'static str,
        largest: usize,
        regions_per_side: impl Fn(usize) -> usize,
        attend: impl for<'t> Fn(usize, &Var<'t>) -> autograd::Result<Var<'t>>,
    ) -> Result<Self> {
        let mut points: Vec<Point> = vec![];
        let mut side = SMALLEST;
        let affordable = |last: &Point| GROWTH * last.forward_backward_ms <= 1e3 * PATIENCE;
        while side <= largest && points.last().is_none_or(affordable) {
            let regions = regions_per_side(side);
            points.push(point(side, regions, |qkv| attend(regions, qkv))?);
            side *= 2;
        }
        let exponent = |value: fn(&Point) -> f64| exponent(points.iter().map(|p| (p.tokens as f64, value(p))));
        Ok(Self {
            attention: name,
            forward_exponent: exponent(|point| point.forward_ms),
            forward_backward_exponent: exponent(|point| point.forward_backward_ms),
            extra_bytes_exponent: exponent(|point| point.extra_bytes as f64),
            points,
        })
    }

    fn print(&self) -> Result<()> {
        say!(
            "\n{:<10} {:>7} {:>4} {:>7} {:>11} {:>20} {:>9}",
            self.attention,
            "tokens",
            "S",
            "keys",
            "forward ms",
            "forward+backward ms",
            "extra MB"
        );
        for point in &self.points {
            let Point { tokens, regions_per_side, keys_per_query, forward_ms, forward_backward_ms, extra_bytes } =
                point;
            let extra = *extra_bytes as f64 / 1e6;
            say!(
                "{:<10} {tokens:>7} {regions_per_side:>4} {keys_per_query:>7} {forward_ms:>11.3} {forward_backward_ms:>20.3} {extra:>9.2}",
                ""
            );
        }
        let written = |exponent: Option<f64>| exponent.map_or("?".to_owned(), |exponent| format!("{exponent:.2}"));
        let [forward, both, extra] =
            [self.forward_exponent, self.forward_backward_exponent, self.extra_bytes_exponent].map(written);
        say!("{:<10} {:>7} {:>4} {:>7} {forward:>11} {both:>20} {extra:>9}", "", "grows", "as", "tokens^");
        Ok(())
    }
}

/// Measures an attention on one map.
fn point(
    side: usize,
    regions_per_side: usize,
    attend: impl for<'t> Fn(&Var<'t>) -> autograd::Result<Var<'t>>,
) -> Result<Point> {
    let tokens = side * side;
    let random = |channels, stream| Tensor::from_slice(&noise(tokens * channels, stream), [1, side, side, channels]);
    let (qkv, upstream) = (random(3 * CHANNELS, 0)?, random(CHANNELS, 1)?);
    let forward = || {
        let tape = Tape::inference();
        Ok(attend(&tape.constant(qkv.clone()))?.into_value())
    };
    let forward_backward = || {
        let tape = Tape::new();
        let x = tape.input(qkv.clone());
        let out = attend(&x)?;
        let mut gradients = Gradients::default();
        tape.backward_from(&out, upstream.clone(), &mut gradients)?;
        Ok((out.into_value(), gradients))
    };
    trim_pool(); // also releases what threads retain from the last map
    reset_peak();
    let results = forward_backward()?;
    let stats = pool_stats();
    drop(results);
    Ok(Point {
        tokens,
        regions_per_side,
        keys_per_query: TOPK.min(regions_per_side.pow(2)) * tokens / regions_per_side.pow(2),
        forward_ms: 1e3 * fastest(forward)?,
        forward_backward_ms: 1e3 * fastest(forward_backward)?,
        extra_bytes: stats.peak_in_use - stats.in_use,
    })
}

/// The seconds of the fastest of at least five runs, and of as many as fit into half a second: other programs can
/// only make a run slower.
fn fastest<R>(work: impl Fn() -> Result<R>) -> Result<f64> {
    let (begun, mut least) = (Instant::now(), f64::INFINITY);
    let mut runs = 0;
    while runs < 5 || begun.elapsed().as_secs_f64() < 0.5 {
        let started = Instant::now();
        black_box(work()?);
        least = least.min(started.elapsed().as_secs_f64());
        runs += 1;
    }
    Ok(least)
}

/// The exponent e of y ~ x^e, by a least-squares fit to the logarithms.
fn exponent(points: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let points: Vec<(f64, f64)> = points.map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = points.len() as f64;
    let (x_mean, y_mean) =
        (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let covariance: f64 = points.iter().map(|(x, y)| (x - x_mean) * (y - y_mean)).sum();
    let variance: f64 = points.iter().map(|(x, _)| (x - x_mean).powi(2)).sum();
    let slope = covariance / variance;
    slope.is_finite().then_some(slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equation_9_is_rounded_to_divisors() {
        assert_eq!([28, 56, 112, 224, 448].map(regions_per_side), [7, 14, 28, 32, 64]);
    }

    #[test]
    fn exponents_are_those_of_powers() {
        let power = |e: f64| exponent([1.0f64, 3.0, 20.0].into_iter().map(|x| (x, 5.0 * x.powf(e))));
        approx::assert_relative_eq!(power(1.5).unwrap(), 1.5, max_relative = 1e-12);
        assert_eq!(exponent([(2.0, 3.0)].into_iter()), None);
    }
}
