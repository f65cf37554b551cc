//! The archive that `torch.save` writes, with nothing in it compressed.

use super::{Problem, Result};
use std::fmt::Display;
use std::fs::File;
use std::io::{BufReader, Read};
use tensor::memory::reserve;
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

/// An open archive, whose entries lie in a folder.
pub struct Archive {
    archive: ZipArchive<BufReader<File>>,
    folder: String,
    left: u64,
}

impl Archive {
    /// Opens an archive, of which at most `left` bytes in all will be read: its entries may overlap, and so hold more
    /// than the file.
    pub fn open(file: File, left: u64) -> Result<Self> {
        let archive = ZipArchive::new(BufReader::new(file)).map_err(|error| error.to_string())?;
        // As PyTorch finds it.
        let first = archive.file_names().next().and_then(std::result::Result::ok);
        let folder = first.and_then(|name| Some(format!("{}/", name.split_once('/')?.0)));
        let folder = folder.filter(|folder| archive.index_for_name(&format!("{folder}data.pkl")).is_some());
        let foreign = || Problem::Unfit("an archive, but none that torch.save wrote; name one that is".to_owned());
        let mut archive = Self { archive, folder: folder.ok_or_else(foreign)?, left };
        match archive.entry("byteorder", 100) {
            Ok(order) if order != b"little" => {
                Err(Problem::Unfit("a big-endian machine wrote it; save it on a little-endian one".to_owned()))
            }
            _ => Ok(archive),
        }
    }

    /// How many bytes may still be read.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The bytes of an entry, `most` of them at most: intact files may have longer ones, beside their weights.
    pub fn entry(&mut self, name: &str, most: u64) -> Result<Vec<u8>> {
        let name = format!("{}{name}", self.folder);
        let told = |error: &dyn Display| format!("{name}: {error}");
        let packed =
            || Problem::Unfit("it is compressed, or encrypted: load it in PyTorch, and save it again".to_owned());
        let mut entry = self.archive.by_name(&name).map_err(|error| match error {
            ZipError::UnsupportedArchive(_) => packed(),
            error => told(&error).into(),
        })?;
        if entry.compression() != CompressionMethod::Stored {
            return Err(packed());
        }
        let size = entry.size();
        if size > most {
            let problem = "is longer than is read; save the weights alone: torch.save(checkpoint[\"model\"], PATH)";
            return Err(Problem::Unfit(format!("{name} {problem}")));
        }
        if size > self.left {
            return Err(told(&"too long").into());
        }
        self.left -= size;
        let mut bytes = vec![];
        reserve(&mut bytes, size as usize).map_err(|error| told(&error))?;
        // One byte more, since the checksum is verified only at the end of the entry.
        entry.by_ref().take(size + 1).read_to_end(&mut bytes).map_err(|error| told(&error))?;
        Ok(bytes)
    }
}
