//! Bi-level routing attention on one image: which regions does a region look at?
//!
//! No training is needed to see routing at work. Here the queries, keys and values are the pixels' colours
//! themselves, normalised to mean 0. So a region is routed to those whose mean colour lies furthest in its own
//! direction: a dark one to the darkest, a red one to the reddest.
//!
//! `cargo run --release --example bra_on_one_image`, or with the number of another test image at the end:
//! `cargo run --release --example bra_on_one_image -- 7`.

use anyhow::{Result, ensure};
use biformer::autograd::Tape;
use biformer::data::{self, Split, Transform};
use biformer::ops::{self, Bra, RouteKind};
use biformer::tensor::Tensor;

/// The side of an image in pixels, regions along each side, and how many regions each region attends to.
const SIDE: usize = 32;
const GRID: usize = 8;
const K: usize = 6;
/// The region that we follow: row 4, column 4.
const QUERY: usize = 4 * GRID + 4;

/// Routes the regions of a test image, shows where one of them looks, and attends.
pub fn main() -> Result<()> {
    let number = std::env::args().nth(1).and_then(|number| number.parse().ok()).unwrap_or(12);
    let images = data::open("embedded", Split::Test)?;
    let sample = images.get(number)?;
    let pixels = Transform::eval(SIDE, images.statistics())?.pixels(&sample.image);

    // qkv (1, H, W, 2D + C): each pixel's colour as query, as key and as value. D = C = 3.
    let qkv: Vec<f32> = pixels.chunks_exact(3).flat_map(|colour| [colour; 3].concat()).collect();
    let qkv = Tensor::from_slice(&qkv, [1, SIDE, SIDE, 9])?;
    let attributes = Bra { heads: 1, qk_dim: 3, topk: K, grid: [GRID, GRID], scale: 3f64.powf(-0.5), valid: None };

    // The routes (1, P, k), and the affinities that decided them.
    let routing = ops::route(&qkv, &attributes)?;
    let routes = routing.routes.to_vec::<u32>()?;
    let affinities = routing.affinities.to_vec::<f32>()?;
    let chosen = &routes[QUERY * K..][..K];
    println!("Test image {number}: {}. Region Q attends to the regions 1 (best) to {K}.\n", {
        &images.classes()[sample.label as usize]
    });
    draw(&sample.image, chosen);
    for (rank, (&region, affinity)) in chosen.iter().zip(&affinities[QUERY * K..]).enumerate() {
        let (row, column) = (region as usize / GRID, region as usize % GRID);
        println!("  {}: region {region:>2} (row {row}, column {column}), affinity {affinity:>6.2}", rank + 1);
    }

    // The attention along these routes. The fused form lays keys and values out once per head; the composed one
    // gathers them k times over, as the paper's algorithm 1 does. They compute the same function.
    let tape = Tape::inference();
    let map = tape.constant(qkv);
    let fused = ops::bra(&map, None, &attributes)?.out.into_value().to_vec::<f32>()?;
    let composed = ops::bra_composed(&map, None, &attributes, RouteKind::Hard)?.out.into_value().to_vec::<f32>()?;
    let apart = fused.iter().zip(&composed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("\nEach query attended to {} of {} tokens.", K * SIDE * SIDE / (GRID * GRID), SIDE * SIDE);
    println!("Fused and composed attention differ by at most {apart:.1e}.");
    ensure!(apart < 1e-5, "fused and composed attention disagree");
    // The maximum above passes over NaN.
    ensure!(fused.iter().all(|x| x.is_finite()), "attention gave a value that is not finite");
    Ok(())
}

/// The image in shades of grey, and beside it the grid of regions.
fn draw(image: &data::Image, chosen: &[u32]) {
    const SHADES: &[u8] = b" .:-=+*#%@";
    let shade = |y: usize, x: usize| {
        let colour = &image.pixels()[(y * SIDE + x) * 3..][..3];
        let brightness: usize = colour.iter().map(|&byte| usize::from(byte)).sum();
        SHADES[brightness * (SHADES.len() - 1) / (3 * 255)] as char
    };
    for row in 0..SIDE / 2 {
        let line: String = (0..SIDE).map(|x| shade(2 * row, x)).collect();
        let regions: String = (0..GRID).map(|column| mark(row / 2 * GRID + column, chosen)).collect();
        println!("  {line}    {}", if row % 2 == 0 { regions } else { String::new() });
    }
    println!();
}

fn mark(region: usize, chosen: &[u32]) -> String {
    match chosen.iter().position(|&other| other as usize == region) {
        _ if region == QUERY => " Q".to_owned(),
        Some(rank) => format!(" {}", rank + 1),
        None => " ·".to_owned(),
    }
}
