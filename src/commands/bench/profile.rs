//! `biformer bench --profile`: the operations of a step, compared with rates that the machine reaches.

use super::noise;
use autograd::{Profile, ProfileLine, Work};
use rayon::prelude::*;
use serde::Serialize;
use std::fmt;
use std::hint::black_box;
use std::time::Instant;
use tensor::cpu::gemm::{Mat, gemm};
use tensor::cpu::parallel::Out;
use tensor::cuda::{Gemm, Matrix};
use tensor::{DType, Device, Tensor};

/// The measured peak rates of this machine with the threads in use, or of a GPU.
#[derive(Clone, Copy, Debug, Serialize)]
struct Ceilings {
    /// The rate of a large matrix product; a multiply-add counts as two operations.
    gflops: f64,
    /// The rate of a copy that is larger than the caches; read and written bytes both count.
    gb_per_s: f64,
    /// The matrices' extent and type, and the bytes of the copy.
    extent: usize,
    matrices: &'static str,
    copied: usize,
}

/// One kind of work in a step.
#[derive(Clone, Debug, Serialize)]
struct Row {
    work: &'static str,
    /// `forward`, `backward`, or empty for work outside the model's operations.
    pass: &'static str,
    calls_per_step: f64,
    ms_per_step: f64,
    /// The part of the step's time, from 0 to 1.
    share: f64,
    gflops: f64,
    gflops_of_ceiling: f64,
    gb_per_s: f64,
    gb_per_s_of_ceiling: f64,
}

/// Where the time of a step goes, the largest part first.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    ceilings: Ceilings,
    rows: Vec<Row>,
}

impl Report {
    /// The report of a profile of this many steps. Measures the ceilings: those of a GPU with its maps' type, or else
    /// those of the thread pool that it is called on. Errors: those of the GPU.
    pub fn new(profile: &Profile, steps: usize, gpu: Option<(&Device, DType)>) -> tensor::Result<Self> {
        let ceilings = match gpu {
            Some((device, maps)) => Ceilings::of_gpu(device, maps)?,
            None => Ceilings::of_cpu()?,
        };
        let (lines, steps) = (profile.lines(), steps as f64);
        let total: f64 = lines.iter().map(|line| line.seconds).sum();
        let row = |line: &ProfileLine| {
            let per_nanosecond = |count: u64| count as f64 / line.seconds.max(f64::MIN_POSITIVE) / 1e9;
            let (gflops, gb_per_s) = (per_nanosecond(2 * line.multiply_adds), per_nanosecond(line.bytes));
            Row {
                work: line.name,
                pass: match line.work {
                    Work::Forward => "forward",
                    Work::Backward => "backward",
                    Work::Other => "",
                },
                calls_per_step: line.calls as f64 / steps,
                ms_per_step: 1e3 * line.seconds / steps,
                share: line.seconds / total.max(f64::MIN_POSITIVE),
                gflops,
                gflops_of_ceiling: gflops / ceilings.gflops,
                gb_per_s,
                gb_per_s_of_ceiling: gb_per_s / ceilings.gb_per_s,
            }
        };
        let mut rows: Vec<Row> = lines.iter().map(row).collect();
        rows.sort_by(|a, b| b.ms_per_step.total_cmp(&a.ms_per_step));
        Ok(Self { ceilings, rows })
    }
}

/// Extent of the matrices whose product measures the peak arithmetic rate.
const EXTENT: usize = 1536;
/// The number of f32 elements whose copy measures the peak bandwidth: 256 MiB, and as much again for the copy.
const COPIED: usize = 64 << 20;

impl Ceilings {
    fn of_cpu() -> tensor::Result<Self> {
        let (a, b) = (vec![1f32; EXTENT * EXTENT], vec![0.5f32; EXTENT * EXTENT]);
        let mut c = vec![0f32; EXTENT * EXTENT];
        let product = seconds(|| {
            gemm(Mat::new(&a, EXTENT, EXTENT), Mat::new(&b, EXTENT, EXTENT), Out::store(&mut c));
            black_box(&c);
            Ok(())
        })?;
        let (from, mut to) = (vec![1f32; COPIED], vec![0f32; COPIED]);
        let part = COPIED.div_ceil(rayon::current_num_threads());
        let copy = seconds(|| {
            to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
            black_box(&to);
            Ok(())
        })?;
        Ok(Self::of_times(product, EXTENT, DType::F32, copy, COPIED * size_of::<f32>()))
    }

    fn of_gpu(device: &Device, maps: DType) -> tensor::Result<Self> {
        const EXTENT: usize = 8192;
        const COPIED: usize = 512 << 20;
        let matrix = Tensor::from_slice(&noise(EXTENT * EXTENT, 0), [EXTENT, EXTENT])?.to_device(device)?.cast(maps)?;
        let mut result = Tensor::empty_on(device, [EXTENT, EXTENT], maps)?;
        let factor = Matrix::plain(&matrix);
        let product = seconds(|| {
            Gemm::new("ceiling", factor, factor, [EXTENT; 3]).into(result.as_out("ceiling", false)?)?;
            device.synchronize()
        })?;
        let copied = Tensor::zeros_on(device, [COPIED], DType::F32)?;
        let copy = seconds(|| {
            let copy = copied.duplicate()?;
            device.synchronize()?;
            drop(copy);
            Ok(())
        })?;
        Ok(Self::of_times(product, EXTENT, maps, copy, copied.bytes()))
    }

    fn of_times(product: f64, extent: usize, dtype: DType, copy: f64, copied: usize) -> Self {
        let (gflops, gb_per_s) = (2.0 * (extent as f64).powi(3) / product / 1e9, 2.0 * copied as f64 / copy / 1e9);
        Self { gflops, gb_per_s, extent, matrices: dtype.name(), copied }
    }
}

/// The median time of five runs, after one that is not timed.
fn seconds(mut work: impl FnMut() -> tensor::Result<()>) -> tensor::Result<f64> {
    work()?;
    let mut times = [0.0; 5];
    for time in &mut times {
        let started = Instant::now();
        work()?;
        *time = started.elapsed().as_secs_f64();
    }
    times.sort_by(f64::total_cmp);
    Ok(times[2])
}

/// A table, and what its figures are compared with.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<20} {:<9} {:>5} {:>9} {:>7}  {:>8} {:>8}  {:>7} {:>8}",
            "work", "pass", "calls", "ms/step", "share", "GFLOP/s", "of most", "GB/s", "of most"
        )?;
        for row in &self.rows {
            let Row { work, pass, calls_per_step: calls, ms_per_step: ms, .. } = row;
            let time = format!("{work:<20} {pass:<9} {calls:>5.0} {ms:>9.3} {:>5.1} %", 100.0 * row.share);
            let arithmetic = rate(row.gflops, row.gflops_of_ceiling);
            let line = format!("{time}  {arithmetic}  {}", rate(row.gb_per_s, row.gb_per_s_of_ceiling));
            writeln!(f, "{}", line.trim_end())?;
        }
        let total: f64 = self.rows.iter().map(|row| row.ms_per_step).sum();
        writeln!(f, "{:<20} {:<9} {:>5} {total:>9.3} {:>5.1} %\n", "in all", "", "", 100.0)?;
        let Ceilings { gflops, gb_per_s, extent, matrices, copied } = self.ceilings;
        let mebibytes = copied >> 20;
        write!(
            f,
            "100 % are {gflops:.1} GFLOP/s, a product of {extent}x{extent} {matrices} matrices, and {gb_per_s:.1} GB/s, a\n\
             copy of {mebibytes} MiB, reads and writes together, as this machine did them just now. GB/s count what an\n\
             operation must read and write; caches, and tensors that are handed on unchanged, can make it more than that."
        )
    }
}

/// A rate and its part of the most, in 17 columns; blank where there is nothing to count.
fn rate(value: f64, of_ceiling: f64) -> String {
    if value == 0.0 {
        return format!("{:17}", "");
    }
    format!("{value:>8.1} {:>6.1} %", 100.0 * of_ceiling)
}
