//! What a pass through a model leaves behind beside its result.

use crate::error::{Error, Result};
use crate::state::StatisticsId;
use ops::{BatchStatistics, Regions};
use tensor::Tensor;

/// Where the regions of a routed attention looked, in one pass.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The attention's name.
    pub name: String,
    /// The k regions that each of P regions was routed to, best first, (N, P, k): an index tensor. Regions are numbered
    /// row by row: p is in row p / G_w and column p % G_w of the grid (G_h, G_w).
    pub indices: Tensor,
    /// How the map was cut into these regions.
    pub regions: Regions,
    /// The map's height and width, beyond which regions are padding.
    pub map: [usize; 2],
}

/// What a pass leaves behind beside its result.
#[derive(Debug, Default)]
pub struct Trace {
    /// In training, the statistics of each BatchNorm's batch: see
    /// [`BiFormer::update_statistics`](crate::BiFormer::update_statistics) and
    /// [`RunningStatistics::update`](crate::RunningStatistics::update).
    pub statistics: Vec<(StatisticsId, BatchStatistics)>,
    /// Where the regions of each routed attention looked, in order. On the CPU, images that skipped an attention in
    /// training, by stochastic depth, have no rows there, nor in `attention_weights`.
    pub routes: Vec<Routes>,
    /// The maps after each merging and each stage, (N, H, W, C), if [`Pass::keep_maps`](crate::Pass::keep_maps) was
    /// called: `down0`, `stage0`, and so on.
    pub maps: Vec<(String, Tensor)>,
    /// How much the token at a point attends to each of its map (N, H, W), f32, in each attention in order, if
    /// [`Pass::attention_from`](crate::Pass::attention_from) was called: the mean of the heads' weights, 0 where it
    /// does not look at all.
    pub attention_weights: Vec<(String, Tensor)>,
    /// The draws of random numbers in this pass, in order: [`Mode::stream`](crate::Mode::stream) gives the stream of
    /// each.
    pub draws: Vec<u64>,
    /// A backbone's results, in inference.
    pub(crate) outputs: Vec<(String, Tensor)>,
}

impl Trace {
    pub(crate) fn append(&mut self, later: Trace) {
        self.statistics.extend(later.statistics);
        self.routes.extend(later.routes);
        self.maps.extend(later.maps);
        self.attention_weights.extend(later.attention_weights);
        self.draws.extend(later.draws);
        self.outputs.extend(later.outputs);
    }

    /// The traces of passes on images that follow one another, as if there had been one on all of them at once.
    ///
    /// Errors: [`Error::Pass`] if one has other entries than the first, or batch statistics, which are not those of all
    /// images; those of [`Tensor::join`].
    pub fn joined(mut pieces: Vec<Trace>) -> Result<Trace> {
        if pieces.iter().any(|piece| !piece.statistics.is_empty()) {
            return Err(Error::Pass { reason: "a part of it normalises by its batch, which was cut into pieces" });
        }
        let mut entries: Vec<_> = pieces.iter_mut().map(Trace::entries).collect();
        let Some((first, later)) = entries.split_first_mut() else { return Ok(Trace::default()) };
        if later.iter().any(|piece| !piece.iter().map(|(name, _)| name).eq(first.iter().map(|(name, _)| name))) {
            return Err(Error::Pass { reason: "its pieces have left different traces" });
        }
        for (place, (_, joined)) in first.iter_mut().enumerate() {
            let parts = later.iter().map(|piece| &*piece[place].1);
            let parts: Vec<Tensor> = std::iter::once(&**joined).chain(parts).cloned().collect();
            **joined = Tensor::join(&parts)?;
        }
        Ok(pieces.swap_remove(0))
    }

    /// Everything with a row for each image, by its name.
    fn entries(&mut self) -> Vec<(&str, &mut Tensor)> {
        let routes = self.routes.iter_mut().map(|routes| (routes.name.as_str(), &mut routes.indices));
        let named = [&mut self.maps, &mut self.attention_weights, &mut self.outputs].into_iter().flatten();
        routes.chain(named.map(|(name, tensor)| (name.as_str(), tensor))).collect()
    }
}
